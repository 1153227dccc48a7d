"""Fine-tune the model of train_trainer.py on Python's manual with LoRA, merge the adapter, and freeze the result.

    python examples/train_trainer.py
    python examples/finetune_lora.py

LoRA learns a low-rank update of each weight. The masks do not change. The example takes about half a minute on 2 CPU
cores. In a clone, `pip install ".[transformers]" peft` installs what the example needs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from local_text import MANUAL, OUTPUT, read, save, split
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from mglu_ops.transformers import freeze


def main() -> None:
    options = parse_options()
    if not Path(options.model).is_dir():
        raise SystemExit(f"--model: no folder {options.model}; run python examples/train_trainer.py first")
    train, held_out = split(read(options.bytes, MANUAL))
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(options.model)
    adapter = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "down_proj"],
        target_parameters=["mglu.weight"],  # MGLU's weight is a parameter, not a linear layer
    )
    model = get_peft_model(base, adapter)
    model.print_trainable_parameters()

    arguments = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        logging_steps=max(1, options.steps // 5),
        save_strategy="no",
        report_to=[],
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=train, eval_dataset=held_out[:64])
    before = trainer.evaluate()["eval_loss"]
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    after = trainer.evaluate()["eval_loss"]
    print(f"{options.steps} steps took {seconds:.1f} s; loss on held-out text: {before:.3f} -> {after:.3f} nats a byte")

    merged = model.merge_and_unload()
    save(freeze(merged), options.output)
    print(f"merged the adapter, packed the masks and saved {options.output}/")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=f"{OUTPUT}/mglu-llama", help="folder of the model to fine-tune")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--bytes", type=int, default=400_000, help="bytes of text to read")
    parser.add_argument("--output", default=f"{OUTPUT}/mglu-llama-manual-frozen", help="folder of the fine-tuned model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
