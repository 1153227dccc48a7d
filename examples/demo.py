"""Time one layer of a real size against SwiGLU, then take a small language model from training to a package.

    python examples/demo.py

The layer shows what MGLU gains on this machine. The model shows each step on the way to inference. It is trained with
naive masked layers, which the fusion pass fuses under `torch.compile`. It is then frozen, writes text, and is exported
and loaded again. At the end, every form of the model is compared with float64, and the program exits with 1 if a form
disagrees. The program needs a C++ compiler, downloads nothing, and takes about two minutes and 3 GB of memory on 2 CPU
cores.
"""

from __future__ import annotations

import argparse
import operator
import os
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics  # the parts of Python's manual that help() shows, mostly English

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor, nn

import mglu_ops
from mglu_ops.accuracy import ERROR_BUDGET, relative_error
from mglu_ops.nn import NaiveMGLU, parameter_groups
from mglu_ops.timer import capture, layers_for, milliseconds

PACKAGE = Path("build/examples/demo.pt2")  # git ignores build/
BYTES_OF_COPIES, MAX_COPIES = 256 << 20, 32
"""A layer is timed in several copies of `BYTES_OF_COPIES` in all, so that weights do not come from a cache."""

HEAD_WIDTH, CONTEXT, BATCH = 32, 128, 8
PROMPT = b"The syntax for "

START = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:4.0f} s] {text}", flush=True)


# --- A layer of a real size -----------------------------------------------------------------------------------------


class SwiGLU(nn.Module):
    """SwiGLU's gated projection with one matrix product for gate and value, its fastest form."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.both = nn.Linear(in_features, 2 * out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, dim=-1)
        return F.silu(gate) * value


Apply = Callable[[nn.Module, Tensor], Tensor]


@dataclass
class Variant:
    """Several copies of a layer, a function that calls one of them, and the result's relative error against float64."""

    name: str
    apply: Apply
    copies: Sequence[nn.Module]
    error: float

    def run(self, x: Tensor) -> list[Tensor]:
        return [self.apply(layer, x) for layer in self.copies]


def bytes_of(layer: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in layer.state_dict().values())


def variants_of(layer: nn.Module, exact: Tensor, x: Tensor, calls: Mapping[str, Apply]) -> Iterator[Variant]:
    """A variant for each way to call the layer. All variants share the same copies."""
    count = min(MAX_COPIES, layers_for(bytes_of(layer), BYTES_OF_COPIES))
    copies = [layer, *(deepcopy(layer) for _ in range(count - 1))]
    for name, apply in calls.items():
        yield Variant(name, apply, copies, relative_error(apply(layer, x), exact))


@torch.no_grad()
def time_layer(out_features: int, in_features: int, device: torch.device) -> None:
    """Print the time and the error of a layer for one token, as SwiGLU and as MGLU with 1 and 4 masks.

    Raises:
        SystemExit: a frozen layer differs from float64 by more than the error budget.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(1, in_features, device=device, dtype=dtype)

    def apply(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)

    compiled = torch.compile(apply, dynamic=False)
    swiglu = SwiGLU(in_features, out_features).to(device, dtype)
    exact = deepcopy(swiglu).double()(x.double())
    variants = list(variants_of(swiglu, exact, x, {"SwiGLU": apply, "SwiGLU, compiled": compiled}))
    for n_masks, name in ((1, "MGLU, 1 mask"), (4, "MGLU, 4 masks")):
        naive = NaiveMGLU(in_features, out_features, n_masks=n_masks, device=device, dtype=dtype)
        exact = deepcopy(naive).double()(x.double())
        frozen = mglu_ops.freeze(deepcopy(naive))
        variants += variants_of(naive, exact, x, {f"{name}, naive, compiled": compiled})
        variants += variants_of(frozen, exact, x, {f"{name}, frozen": apply})
    choice = mglu_ops.explain_dispatch(x, frozen.weight, frozen.packed_masks, frozen.activation)

    times = time_variants(variants, x)
    swiglu_time = min(times["SwiGLU"], times["SwiGLU, compiled"])
    print(f"\n{'':32}{'MB read':>10}{'ms':>10}{'against SwiGLU':>18}{'error':>12}")
    for one in variants:
        megabytes, milliseconds_ = bytes_of(one.copies[0]) / 1e6, times[one.name]
        speed_up = f"{swiglu_time / milliseconds_:.2f}x"
        print(f"{one.name:32}{megabytes:10.1f}{milliseconds_:10.3f}{speed_up:>18}{one.error:12.1e}")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"\n{where}, {str(dtype).removeprefix('torch.')}; frozen layers ran on {choice}\n", flush=True)
    for one in variants:
        if "frozen" in one.name and not one.error <= ERROR_BUDGET[dtype]:
            raise SystemExit(
                f"FAILED: the error of {one.name} is {one.error:.1e}; at most {ERROR_BUDGET[dtype]:.1e} is right"
            )


def time_variants(variants: Sequence[Variant], x: Tensor) -> dict[str, float]:
    """Milliseconds per layer of each variant. On a GPU, a CUDA graph is timed, so that host time does not count."""
    calls: dict[str, Callable[[], object]] = {}
    for one in variants:
        one.run(x)
        calls[one.name] = lambda one=one: one.run(x)
        if x.is_cuda:
            graph = capture(lambda i, one=one: one.apply(one.copies[i], x), len(one.copies)).graph
            calls[one.name] = graph.replay
    times = milliseconds(calls, x.device, rounds=5, calls=20 if x.is_cuda else 1)
    return {one.name: times[one.name] / len(one.copies) for one in variants}


# --- A small language model -----------------------------------------------------------------------------------------


class Block(nn.Module):
    """A pre-norm decoder block with a masked gated linear unit in place of Llama's SwiGLU."""

    def __init__(self, width: int, n_masks: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.RMSNorm(width)
        self.gated = NaiveMGLU(width, 4 * width, n_masks=n_masks)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.gated(self.feed_forward_norm(x)))


class LanguageModel(nn.Module):
    """Maps bytes `[batch, tokens]` to the logits of the next byte, `[batch, tokens, 256]`."""

    def __init__(self, layers: int, width: int, n_masks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, n_masks) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        for embedding in (self.embedding, self.position):
            nn.init.normal_(embedding.weight, std=width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


Forward = Callable[[Tensor], Tensor]
"""A form of the model: a function from tokens to logits."""


def loss_of(logits: Tensor, following: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """The `CONTEXT` bytes from each start, and the bytes that follow each of them."""
    rows = text[starts[:, None] + torch.arange(CONTEXT + 1, device=text.device)]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def train(model: nn.Module, fused: Forward, text: Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=6e-3, weight_decay=0.1), betas=(0.9, 0.95))
    rates = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps, pct_start=0.1)
    for step in range(1, steps + 1):
        inputs, following = windows(text, torch.randint(len(text) - CONTEXT, (BATCH,), device=text.device))
        loss = loss_of(fused(inputs), following)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step == 1 or step % max(1, steps // 5) == 0:
            say(f"step {step} of {steps}: loss {loss.item():.2f} nats a byte")


@torch.no_grad()
def check_learning(model: Forward, text: Tensor, held_out: Tensor) -> None:
    """Print the loss on the held-out text.

    Raises:
        SystemExit: the loss is not below that of a model that knows only the frequencies of bytes.
    """
    inputs, following = windows(held_out, torch.arange(64, device=text.device) * CONTEXT)
    loss = loss_of(model(inputs), following).item()
    frequencies = (torch.bincount(text, minlength=256) + 1) / (len(text) + 256)
    baseline = -frequencies.log()[following].mean().item()
    say(f"loss of the frozen model on held-out text {loss:.2f} nats a byte; of byte frequencies {baseline:.2f}")
    if not loss < baseline:
        raise SystemExit("FAILED: the model has not learned more than the frequencies of bytes")


@torch.no_grad()
def generate(model: Forward, count: int, device: torch.device) -> str:
    """Sample bytes after `PROMPT` at temperature 0.7, without a cache."""
    text = list(PROMPT)
    for _ in range(count):
        logits = model(torch.tensor([text[-CONTEXT:]], device=device))[0, -1]
        text.append(int(torch.multinomial((logits / 0.7).softmax(0), 1)))
    return "".join(chr(byte) if 32 <= byte < 127 else " " for byte in text)


def export(frozen: nn.Module, example: Tensor) -> Forward:
    """Export the model for any batch and any number of tokens up to the context, and load the package."""
    PACKAGE.parent.mkdir(parents=True, exist_ok=True)
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("tokens", max=CONTEXT)}
    mglu_ops.export(frozen, (example,), PACKAGE, dynamic_shapes=(sizes,), strict=True)
    say(f"wrote {PACKAGE} ({PACKAGE.stat().st_size / 1e6:.1f} MB), and loads it")
    return mglu_ops.load(PACKAGE)


# --- Agreement ------------------------------------------------------------------------------------------------------


def gradients(model: nn.Module, logits: Tensor, following: Tensor) -> dict[str, Tensor]:
    """The gradient of the loss for each parameter."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss_of(logits, following), parameters), strict=True))


def largest(errors: Iterable[float]) -> float:
    """The largest error, or NaN if any error is NaN (Python's `max` may skip NaN)."""
    return torch.tensor(list(errors)).max().item()


def compare(
    model: nn.Module, fused: Forward, deployed: Mapping[str, Forward], inputs: Tensor, following: Tensor
) -> bool:
    """Print the error of each form of the model against float64, and return True if all are small enough.

    A form's error may be twice the error of the naive model in eager mode, which rounds too. A batch and a single token
    run different kernels. For `deployed` forms, both are checked, and the larger error counts.
    """
    exact = deepcopy(model).double()
    exact_logits = exact(inputs)
    exact_gradients = gradients(exact, exact_logits, following)
    errors: dict[str, list[float]] = {}  # errors of the outputs and, for trained forms, of the worst gradient
    for name, form in (("naive, in eager mode", model), ("compiled and fused", fused)):
        logits = form(inputs)
        found = gradients(model, logits, following)
        worst = largest(relative_error(found[key], exact_gradients[key]) for key in found)
        errors[name] = [relative_error(logits, exact_logits), worst]
    with torch.no_grad():
        for name, form in deployed.items():
            one_token = relative_error(form(inputs[:1, :1].contiguous()), exact_logits[:1, :1])
            errors[name] = [largest([relative_error(form(inputs), exact_logits), one_token])]

    allowed = [max(ERROR_BUDGET[torch.float32], 2 * error) for error in errors["naive, in eager mode"]]
    wrong = {name for name, own in errors.items() if not all(map(operator.le, own, allowed))}
    print(f"\n{'error against float64':24}{'outputs':>12}{'gradients':>12}")
    for name, own in errors.items():
        shown = "".join(f"{error:12.1e}" for error in own)
        print(f"{name:24}{shown:24}  {'DISAGREES' if name in wrong else 'agrees'}")
    return not wrong


def run_model(layers: int, width: int, n_masks: int, steps: int, device: torch.device) -> None:
    """Train, freeze, export and compare the language model.

    Raises:
        SystemExit: a layer was not fused, the model has not learned, or two of its forms disagree.
    """
    manual = "\n\n".join(f"{name}\n{text}" for name, text in sorted(topics.items())).encode()
    data = torch.frombuffer(bytearray(manual), dtype=torch.uint8).long().to(device)
    text, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    model = LanguageModel(layers, width, n_masks).to(device)
    say(f"trains on {len(text):,} bytes of Python's help; layers: {layers}, width: {width}, masks: {n_masks}, float32")
    with mglu_ops.fusion(strict=True) as report:
        fused = torch.compile(model, dynamic=False)
        train(model, fused, text, steps)
    print(f"\nWhat the pass fused: {report}\n", flush=True)
    if len(report.fused) != layers:
        raise SystemExit(f"FAILED: the pass fused {len(report.fused)} of {layers} layers")

    frozen = mglu_ops.freeze(deepcopy(model).eval())
    check_learning(frozen, text, held_out)
    say("the frozen model writes:")
    print(textwrap.indent(textwrap.fill(generate(frozen, 200, device)), "         "), flush=True)
    inputs, following = windows(held_out, torch.arange(BATCH, device=device) * CONTEXT)
    say("exports the frozen model with AOTInductor")
    package = export(frozen, inputs)
    if not compare(model, fused, {"frozen": frozen, "exported and loaded": package}, inputs, following):
        raise SystemExit("FAILED: the forms of the model disagree")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", type=int, nargs=2, default=(8192, 2048), metavar=("OUT", "IN"), help="layer to time")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model")
    parser.add_argument("--width", type=int, default=128, help="width of the model, a multiple of 32")
    parser.add_argument("--n-masks", type=int, default=4, help="masks of each layer of the model, 1 to 16")
    parser.add_argument("--steps", type=int, default=350, help="training steps")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    smallest = {"layer": 1, "layers": 1, "width": HEAD_WIDTH, "n_masks": 1, "steps": 20}
    for name, number in {**vars(options), "layer": min(options.layer)}.items():
        if name in smallest and number < smallest[name]:
            parser.error(f"--{name.replace('_', '-')}: got {number}, must be at least {smallest[name]}")
    if options.n_masks > 16:
        parser.error(f"--n-masks: got {options.n_masks}, must be at most 16")
    if options.width % HEAD_WIDTH:
        parser.error(f"--width: got {options.width}, must be a multiple of {HEAD_WIDTH}")
    device = torch.device(options.device)
    torch.manual_seed(0)
    out_features, in_features = options.layer
    say(f"one layer of {out_features} x {in_features}, one token, as in the decoding of a real model")
    time_layer(out_features, in_features, device)
    say("a whole model. One this small gains nothing: calling a layer takes longer than reading its weights.")
    run_model(options.layers, options.width, options.n_masks, options.steps, device)
    say(f"everything agrees; the CPU worked for {sum(os.times()[:4]):.0f} s")


if __name__ == "__main__":
    main()
