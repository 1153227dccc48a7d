"""Convert a SwiGLU Llama to MGLU, train the result, and save it for vLLM.

    python examples/convert_swiglu.py

The SwiGLU model, the teacher, is a small Llama, which is trained first on Python's source files. `convert` fits each
MGLU layer to a layer of the teacher. Its masks are then packed, and the weights train on the text and on the teacher's
predictions. For comparison, a copy of the teacher trains on for as many steps, since more training alone lowers the
loss. The example takes about two minutes on 2 CPU cores. It needs `pip install ".[transformers]"` in a clone.

The errors of a teacher this small and this briefly trained are smaller than those of a larger one, so do not expect
them of your own model. benchmarks/learning/README.md has the figures of a model of 25M weights.

For a model of your own, load the teacher with `AutoModelForCausalLM.from_pretrained(...)`, and take tokens of text as
the teacher has seen it. mglu_ops/transformers/README.md says which models can be converted.
"""

from __future__ import annotations

import argparse
import copy
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
from mglu_ops.transformers import convert, freeze

Loss = Callable[[Any, Tensor], Tensor]
SEQUENCES = 16  # in a batch


def main() -> None:
    options = parse_options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = read(options.bytes).to(device)
    text, held_out = tokens[: -len(tokens) // 10], tokens[-len(tokens) // 10 :]
    torch.manual_seed(0)
    teacher = LlamaForCausalLM(LlamaConfig(**COMMON, **SIZES[options.size])).to(device)
    train("teacher", teacher, loss_of_text, text, options.steps, lr=1e-3)
    report("teacher", teacher, held_out)

    batches = [batch_of(text) for _ in range(-(-options.tokens // (SEQUENCES * LENGTH)))]
    start = time.perf_counter()
    model, errors = (conversion := convert(teacher, batches, options.n_masks, tokens=options.tokens))
    print(f"conversion: {len(errors)} layers took {time.perf_counter() - start:.1f} s; their errors after each step:")
    print(conversion.table())
    report("converted", freeze(model), held_out)  # no measured run changed fitted masks

    def text_and_predictions(model: Any, batch: Tensor) -> Tensor:
        result = model(batch, labels=batch)
        with torch.no_grad():
            predictions = teacher(batch).logits.log_softmax(-1).flatten(0, 1)
        ours = result.logits.log_softmax(-1).flatten(0, 1)
        return 0.5 * result.loss + 0.5 * F.kl_div(ours, predictions, log_target=True, reduction="batchmean")

    trained_on, more = copy.deepcopy(teacher), -(-options.steps // 5)
    train("copy of the teacher", trained_on, loss_of_text, text, more, lr=3e-4)
    report("teacher trained on", trained_on, held_out)
    train("converted model", model, text_and_predictions, text, more, lr=3e-4)
    report("converted and trained", model, held_out)
    save(model, options.output)
    print(f"saved {options.output}/, which vLLM serves:\n    vllm serve {options.output}")


def loss_of_text(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch, labels=batch).loss
    return loss


def batch_of(tokens: Tensor) -> Tensor:
    """Sequences `[SEQUENCES, LENGTH]` from random places of a text."""
    starts = torch.randint(len(tokens) - LENGTH, (SEQUENCES,))
    return torch.stack([tokens[i : i + LENGTH] for i in starts])


def train(name: str, model: Any, loss_of: Loss, tokens: Tensor, steps: int, lr: float) -> None:
    """Train a model with AdamW and a learning rate that falls linearly to 0."""
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=lr, weight_decay=0.1))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    model.train()
    start = time.perf_counter()
    for _ in (bar := tqdm(range(steps), desc=f"training the {name}")):
        loss = loss_of(model, batch_of(tokens))
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
    parser.add_argument("--steps", type=int, default=600, help="steps of the teacher; a fifth of it follows")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--n-masks", type=int, default=1, help="number of masks (default: 1)")
    parser.add_argument("--bytes", type=int, default=1_000_000, help="bytes of text to read")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens to which the layers are fitted")
    parser.add_argument("--output", default=f"{OUTPUT}/mglu-llama-converted", help="folder of the converted model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
