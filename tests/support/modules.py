"""Modules of layers and of experts, and short training runs of small models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mglu_ops.nn import MGLU, MGLUExperts, NaiveMGLU, NaiveMGLUExperts, parameter_groups

STEPS = 200
WIDTH, OUTPUTS = 24, 8
TOKENS = 64
LR, MASK_LR = 1e-2, 1e-3

# Until a mask differs, losses of two float32 runs differ only by rounding. The largest relative difference was 4e-6
# with 24 seeds.
SAME_LOSS = 4e-5
# The first mask bit that differs belongs to a logit so close to 0 that rounding gives it different signs in the two
# runs. The largest such logit measured was 3e-7, while a step changes logits by up to MASK_LR. From then on the runs
# diverge slowly, because one bit is a small change. The measured difference was 0.3% of the curve and 5% of the final
# masks. About 30% of all bits flip during a run, so 42% of the final bits of unrelated runs would differ.
ON_THE_EDGE = 1e-2 * MASK_LR
PARTED_CURVE = 2e-2
PARTED_MASKS = 0.15
PARTED_FLIPS = 0.03
# In 16 bits, masks differ from the first steps on, also between the naive layer and a float32 run. Measured on a CPU,
# the fused layer is at most 1.16 times as far from the float32 run as the naive layer is.
NAIVE_DISTANCE = 1.5


class Block(nn.Module):
    """A feed-forward block with a residual connection."""

    def __init__(self, kind: type[MGLU | NaiveMGLU], n_masks: int, width: int, **options: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gated = kind(width, 2 * width, n_masks=n_masks, **options)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.gated(self.norm(x)))


def student(kind: type[MGLU | NaiveMGLU], n_masks: int = 2, width: int = WIDTH, **options: bool) -> nn.Sequential:
    """Two blocks and a linear layer, with the same initial parameters at every call."""
    torch.manual_seed(0)
    blocks = [Block(kind, n_masks, width, **options) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(width, OUTPUTS))


def batches(steps: int, tokens: int = TOKENS, width: int = WIDTH) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs `[tokens, width]` and the results `[tokens, OUTPUTS]` of a fixed network, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(width, 32, generator=generator) * (WIDTH / width) ** 0.5
    second = torch.randn(32, OUTPUTS, generator=generator) / 4
    for _ in range(steps):
        x = torch.randn(tokens, width, generator=generator)
        yield x, torch.tanh(x @ first) @ second


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameter_groups(model, lr=LR, mask_lr=MASK_LR, weight_decay=0.1))


@dataclass(frozen=True)
class Run:
    """The loss of each step, float64 `[steps]`, and all logits before each step and at the end, `[steps + 1, n]`."""

    losses: Tensor
    logits: Tensor

    @property
    def flips(self) -> float:
        """The fraction of mask bits that differ between the beginning and the end."""
        return ((self.logits[0] > 0) != (self.logits[-1] > 0)).float().mean().item()

    def curve_distance(self, other: Run) -> float:
        return ((self.losses - other.losses).norm() / other.losses.norm()).item()

    def masks_distance(self, other: Run) -> float:
        return ((self.logits[-1] > 0) != (other.logits[-1] > 0)).float().mean().item()


def train(
    model: nn.Sequential,
    forward: Callable[[Tensor], Tensor] | None = None,
    *,
    tokens: int = TOKENS,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Run:
    """Train a `student` with AdamW on its device and in its dtype. `forward` may be the compiled model."""
    forward = forward or model
    like = next(model.parameters())
    device, width = like.device.type, model[-1].in_features
    scaler = scaler or torch.amp.GradScaler(device, enabled=False)
    optimizer, losses, logits = optimizer_of(model), [], []
    masks = [parameter for name, parameter in model.named_parameters() if name.endswith("mask_logits")]

    def remember() -> None:
        logits.append(torch.cat([parameter.detach().float().flatten() for parameter in masks]))

    for x, target in batches(STEPS, tokens, width):
        remember()
        optimizer.zero_grad()
        with torch.autocast(device, autocast, enabled=autocast is not None):
            result = forward(x.to(like))
        loss = F.mse_loss(result.double(), target.to(device, torch.float64))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    remember()
    return Run(torch.stack(losses).cpu(), torch.stack(logits).cpu())


def assert_learned(run: Run) -> None:
    """Assert that the loss fell by over half and that over 10% of mask bits flipped.

    Comparing runs that learned less would prove little.
    """
    assert run.losses[-20:].mean() < 0.5 * run.losses[:5].mean()
    assert run.flips > 0.1


def assert_same_training(got: Run, want: Run) -> None:
    """Assert that two float32 runs differ by no more than rounding can cause."""
    assert_learned(want)
    masks_differ = (got.logits > 0) != (want.logits > 0)
    steps = masks_differ.any(1).nonzero().flatten()
    first = int(steps[0]) if len(steps) else len(want.losses)
    relative = ((got.losses - want.losses) / want.losses).abs()
    assert relative[:first].max() <= SAME_LOSS, f"masks differ from step {first}"
    if len(steps):
        assert first > 0
        flipped = masks_differ[first]
        edge = torch.maximum(got.logits[first].abs(), want.logits[first].abs())[flipped].max().item()
        assert edge <= ON_THE_EDGE, f"a logit differs in sign at step {first}, but is {edge} from 0"
    assert got.curve_distance(want) <= PARTED_CURVE
    assert got.masks_distance(want) <= PARTED_MASKS
    assert abs(got.flips - want.flips) <= PARTED_FLIPS


def assert_as_good_as_naive(got: Run, naive: Run, exact: Run) -> None:
    """Assert that a 16-bit run is about as close to `exact` as `naive` is.

    Args:
        got: the run in 16 bits.
        naive: the naive layer's run in 16 bits.
        exact: the naive layer's run in float32.
    """
    assert_learned(exact)
    assert got.curve_distance(exact) <= NAIVE_DISTANCE * naive.curve_distance(exact)
    assert got.masks_distance(exact) <= NAIVE_DISTANCE * naive.masks_distance(exact)
    assert abs(got.flips - exact.flips) <= PARTED_FLIPS


# --- Experts ----------------------------------------------------------------------------------------------------------

KINDS = [MGLUExperts, NaiveMGLUExperts]
each_kind = pytest.mark.parametrize("kind", KINDS)
learned_or_fixed = pytest.mark.parametrize("learnable_masks", [True, False], ids=["learned", "fixed"])


def pair(*args: Any, kinds: Sequence[type[nn.Module]] = KINDS, seed: int = 0, **options: Any) -> list[nn.Module]:
    """Layers of each kind, such as MGLUExperts and NaiveMGLUExperts, with the same parameters, drawn from one seed."""
    layers = []
    for kind in kinds:
        torch.manual_seed(seed)
        layers.append(kind(*args, **options))
    return layers


def results(layer: nn.Module, x: Tensor, *ids_and_grad: Tensor) -> dict[str, Tensor]:
    """The result `y` for x (and ids, if the layer has experts), and the gradients of x and the parameters."""
    *ids, grad = ids_and_grad
    x = x.detach().clone().requires_grad_()
    y = layer(x, *ids)
    named = {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad}
    grads = torch.autograd.grad(y, [x, *named.values()], grad)
    return {"y": y.detach(), "x": grads[0]} | dict(zip(named, grads[1:], strict=True))


def layer_of(layer: nn.Module, expert: int, kind: type[nn.Module] = MGLU) -> nn.Module:
    """One expert as a layer of its own."""
    options = {"weight_format": layer.weight_format, "top_k": layer.top_k, "activation": layer.activation}
    sizes = {"n_masks": layer.n_masks, "learnable_masks": layer.learnable_masks, "dtype": layer.weight.dtype}
    sizes |= {} if layer.weight_format == "dense" else {"dtype": None}
    one = kind(layer.in_features, layer.out_features, **options, **sizes)
    state = layer.state_dict()
    one.load_state_dict({name: t if name.startswith("router") else t[expert] for name, t in state.items()})
    return one
