"""Generate text with a frozen model and a static cache. On a GPU, Transformers compiles each step into a CUDA graph.

    python examples/train_trainer.py
    python examples/serve_generate.py --prompt "def main("

The example prints the text, and the tokens per second of two calls. Only the second rate counts, because the first call
compiles on a GPU, and may build the kernels on a CPU. The example takes about 15 s on 2 CPU cores. In a clone,
`pip install ".[transformers]"` installs what it needs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from local_text import OUTPUT, decode, encode
from transformers import AutoModelForCausalLM, CompileConfig

from mglu_ops.transformers import freeze


def main() -> None:
    options = parse_options()
    if not Path(options.model).is_dir():
        raise SystemExit(f"--model: no folder {options.model}; run python examples/train_trainer.py first")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else "auto"
    model = AutoModelForCausalLM.from_pretrained(options.model, device_map=device, dtype=dtype)
    if model.config.learnable_masks:
        freeze(model)
        print("packed the masks; save the model once more, and the next start need not")
    prompt = encode(options.prompt)[None].expand(options.batch, -1).to(device)

    # Because the cache is static, Transformers compiles the steps of `generate`, but only on GPUs. `reduce-overhead`
    # records CUDA graphs, and `fullgraph=True` raises an error at a graph break.
    compiled = CompileConfig(fullgraph=True, mode="reduce-overhead")
    print("steps are compiled into CUDA graphs" if device == "cuda" else "no GPU: steps are not compiled")
    for call in ("first", "second"):
        start = time.perf_counter()
        text = model.generate(
            prompt,
            max_new_tokens=options.steps,
            min_new_tokens=options.steps,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
            compile_config=compiled,
        )
        rate = options.batch * options.steps / (time.perf_counter() - start)  # `generate` waits for the last token
        print(f"{call} call: {rate:.0f} tokens/s on {device}, {options.batch} sequences of {options.steps} new tokens")
    print(decode(text[0].cpu()))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=f"{OUTPUT}/mglu-llama-frozen", help="folder of the model")
    parser.add_argument("--prompt", default="    def __init__(self", help="text to continue")
    parser.add_argument("--steps", type=int, default=100, help="tokens to generate")
    parser.add_argument("--batch", type=int, default=1, help="sequences to generate at once")
    return parser.parse_args()


if __name__ == "__main__":
    main()
