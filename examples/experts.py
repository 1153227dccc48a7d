"""Train a small Qwen3-MoE with MGLU experts on Python's source files, freeze it, quantize its experts, and serve it.

    python examples/experts.py --weight-format int8_row
    python examples/serve_generate.py --model build/examples/mglu-qwen3-moe

Each token is a byte, and uses 2 of the 8 experts of a layer. The first command lets the frozen and quantized model
continue a text, and saves the model with a tokenizer, so that `serve_generate.py` and vLLM can read it. The example
takes about two minutes on 2 CPU cores. In a clone, `pip install ".[transformers]"` installs what it needs.
"""

from __future__ import annotations

import argparse

import torch
from local_text import COMMON, OUTPUT, SIZES, decode, encode, read, save, split
from torch import nn
from transformers import AutoModelForCausalLM, TrainingArguments

import mglu_ops
from mglu_ops.transformers import MGLUQwen3MoeConfig, MGLUQwen3MoeForCausalLM, MGLUTrainer, freeze


def main() -> None:
    options = parse_options()
    train, held_out = split(read(options.bytes))
    torch.manual_seed(0)
    sizes = SIZES[options.size]
    config = MGLUQwen3MoeConfig(
        num_experts=options.experts,
        num_experts_per_tok=options.top_k,
        moe_intermediate_size=sizes["intermediate_size"] // 2,
        num_key_value_heads=sizes["num_attention_heads"],
        output_router_logits=True,  # adds the load-balancing loss
        n_masks=options.n_masks,
        weight_init="leveled",
        **COMMON,
        **sizes,
    )
    model = MGLUQwen3MoeForCausalLM(config)
    print(f"{model.num_parameters():,} parameters and logits, {options.experts} experts in each layer")

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
    )
    trainer = MGLUTrainer(model=model, args=arguments, train_dataset=train, eval_dataset=held_out[:64])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    print(f"{options.steps} steps: {before:.3f} -> {trainer.evaluate()['eval_loss']:.3f}, the loss on held-out text")

    experts = model.model.layers[0].mlp.experts
    freeze(model)
    print(f"frozen: {trainer.evaluate()['eval_loss']:.3f}")
    size = size_of(experts)
    mglu_ops.quantize(model, options.weight_format)
    print(f"{options.weight_format}: {trainer.evaluate()['eval_loss']:.3f}")
    print(f"the experts of a layer: {size} -> {size_of(experts)} bytes, with their masks")

    save(model, options.output)
    served = AutoModelForCausalLM.from_pretrained(options.output, dtype="auto").eval()
    prompt = encode("    def __init__(self")[None]
    text = served.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=0, cache_implementation="static")
    print(f"loaded from {options.output}/, it writes {decode(text[0])!r}")


def size_of(module: nn.Module) -> int:
    """The bytes of a module's weights, scales and masks."""
    return sum(tensor.nbytes for tensor in module.state_dict().values())


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--experts", type=int, default=8, help="experts of a layer (default: 8)")
    parser.add_argument("--top-k", type=int, default=2, help="experts of a token (default: 2)")
    parser.add_argument("--n-masks", type=int, default=2, help="masks of an expert (default: 2)")
    parser.add_argument("--weight-format", default="int8_row", help="fp8_row, fp8_block, int8_row or int4_group")
    parser.add_argument("--bytes", type=int, default=1_000_000, help="bytes of text to read")
    parser.add_argument("--output", default=f"{OUTPUT}/mglu-qwen3-moe", help="folder of the quantized model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
