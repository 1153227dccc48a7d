"""Train a small SwiMGLU Llama on Python's source files with Hugging Face's Trainer, and freeze it.

    python examples/train_trainer.py

The example writes the trained model to `build/examples/mglu-llama` (with mask logits, to train further) and to
`build/examples/mglu-llama-frozen` (with packed masks, for inference). Both folders have a tokenizer, so that
evaluate.py and vLLM can read them. The example takes about a minute on 2 CPU cores. In a clone,
`pip install ".[transformers]"` installs what it needs.
"""

from __future__ import annotations

import argparse
import time

import torch
from local_text import COMMON, OUTPUT, SIZES, decode, encode, read, save, split
from transformers import TrainingArguments

from mglu_ops.transformers import MGLULlamaConfig, MGLULlamaForCausalLM, MGLUTrainer, freeze


def main() -> None:
    options = parse_options()
    train, held_out = split(read(options.bytes))
    torch.manual_seed(0)
    config = MGLULlamaConfig(n_masks=options.n_masks, weight_init="leveled", **COMMON, **SIZES[options.size])
    model = MGLULlamaForCausalLM(config)
    print(f"{model.num_parameters():,} parameters and logits, {options.n_masks} masks; {len(train)} examples")

    arguments = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        weight_decay=0.1,  # for weights only, because MGLUTrainer exempts mask logits
        lr_scheduler_type="cosine",
        warmup_steps=options.steps // 10,
        logging_steps=max(1, options.steps // 5),
        save_strategy="no",
        report_to=[],
        torch_compile=options.compile,
    )
    trainer = MGLUTrainer(model=model, args=arguments, train_dataset=train, eval_dataset=held_out[:64])
    before = trainer.evaluate()["eval_loss"]
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    after = trainer.evaluate()["eval_loss"]
    print(f"{options.steps} steps took {seconds:.1f} s; loss on held-out text: {before:.3f} -> {after:.3f} nats a byte")

    save(model, options.output)
    model.eval()
    prompt = encode("    def __init__(self")[None].to(model.device)
    print("sample:", repr(decode(model.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)[0].cpu())))
    save(freeze(model), f"{options.output}-frozen")
    print(f"saved {options.output}/ and {options.output}-frozen/")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--n-masks", type=int, default=2, help="number of masks (default: 2)")
    parser.add_argument("--bytes", type=int, default=1_000_000, help="bytes of text to read")
    parser.add_argument("--compile", action="store_true", help="train with torch.compile")
    parser.add_argument("--output", default=f"{OUTPUT}/mglu-llama", help="folder of the trained model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
