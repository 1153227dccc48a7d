"""Make an MGLU model from a SwiGLU Llama, and train it on the teacher's predictions.

    python examples/distill_from_swiglu.py

The teacher is a small Llama, which is trained first on Python's source files. Your own teacher can be any model in the
table of mglu_ops/transformers/README.md, loaded with `AutoModelForCausalLM.from_pretrained(...)`. That README also says
how to convert and save other models. The example takes about two minutes on 2 CPU cores. In a clone,
`pip install ".[transformers]"` installs what it needs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from local_text import COMMON, LENGTH, OUTPUT, SIZES, read, save
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from mglu_ops.nn import parameter_groups
from mglu_ops.transformers import freeze, from_swiglu

Loss = Callable[[Any, Tensor], Tensor]


def main() -> None:
    options = parse_options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = read(options.bytes).to(device)
    train, held_out = tokens[: -len(tokens) // 10], tokens[-len(tokens) // 10 :]
    torch.manual_seed(0)
    teacher = LlamaForCausalLM(LlamaConfig(**COMMON, **SIZES[options.size])).to(device)
    fit("teacher", teacher, lambda model, batch: model(batch, labels=batch).loss, train, options.steps)
    report("teacher", teacher, held_out)

    student = from_swiglu(teacher, options.n_masks)
    report("student as converted", student, held_out)

    @torch.no_grad()
    def predicted(batch: Tensor) -> Tensor:
        return teacher(batch).logits.log_softmax(-1)

    def divergence(model: Any, batch: Tensor) -> Tensor:
        own = model(batch).logits.log_softmax(-1)
        return F.kl_div(own.flatten(0, 1), predicted(batch).flatten(0, 1), log_target=True, reduction="batchmean")

    fit("student", student, divergence, train, options.steps)
    report("student as trained", student, held_out)
    save(freeze(student), options.output)
    print(f"packed the masks and saved {options.output}/")


def fit(name: str, model: Any, loss_of: Loss, tokens: Tensor, steps: int) -> None:
    """Train a model with AdamW and a learning rate that falls linearly to 0."""
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=5e-3, weight_decay=0.1))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    model.train()
    start = time.perf_counter()
    for _ in (bar := tqdm(range(steps), desc=f"training the {name}")):
        starts = torch.randint(len(tokens) - LENGTH, (16,))
        loss = loss_of(model, torch.stack([tokens[i : i + LENGTH] for i in starts]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.eval()
    print(f"{name}: {steps} steps took {time.perf_counter() - start:.1f} s")


@torch.no_grad()
def report(name: str, model: Any, tokens: Tensor) -> None:
    batch = tokens[: min(64, len(tokens) // LENGTH) * LENGTH].view(-1, LENGTH)
    print(f"{name}: loss on held-out text {model(batch, labels=batch).loss.item():.3f} nats a byte")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="steps for the teacher, and again for the student")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--n-masks", type=int, default=2, help="number of masks (default: 2)")
    parser.add_argument("--bytes", type=int, default=1_000_000, help="bytes of text to read")
    parser.add_argument("--output", default=f"{OUTPUT}/mglu-llama-distilled", help="folder of the student")
    return parser.parse_args()


if __name__ == "__main__":
    main()
