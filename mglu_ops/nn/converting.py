"""Converts trained SwiGLU models to MGLU models, with masks and weights fitted layer by layer to real inputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..activations import get_activation
from ..files import as_path
from .conversion import GatedUnit, from_swiglu, gated_units
from .feed_forward import MGLUFeedForward
from .fitting import Rows, Sample, fit, sensitivities
from .masked_linear import LOGITS_STD

if TYPE_CHECKING:
    from typing_extensions import Unpack

Run = Callable[[nn.Module, Any], object]


class FitOptions(TypedDict, total=False):
    """The options of the fit in `convert`.

    Attributes:
        run: calls a model with a batch, in place of the calls that `convert` describes.
        tokens: size of the sample, drawn evenly from all batches, 65536 by default. It should be several times the
            intermediate size.
        folder: a folder for the fitted layers. A call that was stopped goes on after the layers that are there.
        progress: show a progress bar, True by default.
    """

    run: Run | None
    tokens: int
    folder: str | os.PathLike[str] | None
    progress: bool


class Conversion(NamedTuple):
    """The result of `convert`.

    Attributes:
        model: the MGLU model.
        errors: for each converted layer, the error `E |y' - y|^2 / E |y|^2` of its result y' against the result y of
            the SwiGLU model's layer for the same inputs: of conversion by magnitude, and after each step of the fit.
    """

    model: Any
    errors: dict[str, dict[str, float]]

    def table(self) -> str:
        """The errors as a table in Markdown, with a line for each layer."""
        columns = list(next(iter(self.errors.values())))
        lines = [["layer", *columns], ["---"] * (len(columns) + 1)]
        lines += [[path, *(f"{error:.4f}" for error in of.values())] for path, of in self.errors.items()]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def convert(
    model: nn.Module,
    batches: Sequence[Any],
    n_masks: int = 1,
    *,
    projections: Sequence[str] | None = None,
    **options: Unpack[FitOptions],
) -> Conversion:
    """Copy a model, with an `MGLUFeedForward` in place of each gated feed-forward layer, fitted to its results.

    `from_swiglu` makes the copy, and says which layers it takes. Then the layers are fitted one after the other, in the
    order in which they run. The inputs of a layer are taken from the copy, whose earlier layers are fitted already, so
    that later layers make up for errors of earlier ones. `mglu_ops.nn.fitting` has the equations of the fit: masks and
    weight by ADMM, the down projection by least squares, and then both weights together by Adam.

    The copy predicts worse than the model at first. Train it on text and on the predictions of the model. Section
    Conversion of `benchmarks/learning/README.md` says what each step gains, and `examples/convert_swiglu.py` is an
    example. Besides the copy, the fit needs memory for the sample of one
    layer: `4 * tokens * (2 * hidden + 3 * intermediate)` bytes, and four more for each element of its weights.

    Args:
        model: a model, or a part of one, on one device. It is not changed. It may be in any training mode; the inputs
            are computed in evaluation mode.
        batches: what the model is called with, one after the other, for example tokens int64 `[sequences, length]`. A
            mapping gives keyword arguments, and a tuple gives arguments. Sequences must have no padding.
        n_masks: number of masks, 1 to 16. They are learned masks, without a router.
        projections: names of the projections in a feed-forward layer, as in `from_swiglu`.
        options: the options of the fit, see `FitOptions`.

    Returns:
        The copy and the errors of its layers.

    Raises:
        TypeError: as in `from_swiglu`; or `batches` is not a sequence.
        ValueError: as in `from_swiglu`; there are fewer tokens than the hidden size; a layer does not run, or its
            inputs are not finite; or `folder` has layers of another conversion.
    """
    student = from_swiglu(model, n_masks, projections=projections)
    units = gated_units(model, projections)
    return fitted(model, student, units, batches, **options)


def check_batches(batches: object, tokens: object) -> None:
    if not isinstance(batches, Sequence):
        raise TypeError(f"batches: got {type(batches).__name__}, must be a sequence, which is read once for each layer")
    if not batches:
        raise ValueError("batches: got none, must be at least one")
    if not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens: got {tokens!r}, must be an int of at least 1")


@torch.no_grad()
def fitted(
    model: nn.Module,
    student: Any,
    units: Mapping[nn.Module, GatedUnit],
    batches: Sequence[Any],
    *,
    run: Run | None = None,
    tokens: int = 65536,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Conversion:
    """Fit the layers of `student`, which `from_swiglu` has made of `model`, as `convert` describes it.

    `units` are the matrices of the layers of `model`. A layer of `student` has the path of the layer of `model`.
    """
    from tqdm import tqdm  # not needed by those who only import mglu_ops

    check_batches(batches, tokens)
    paths = {path: units[module] for path, module in model.named_modules() if module in units}
    layers: dict[str, MGLUFeedForward] = {path: student.get_submodule(path) for path in paths}
    run, errors = run or call, dict[str, dict[str, float]]()
    place = None if folder is None else as_path("folder", folder)
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
    with in_evaluation_mode(student):
        calls = calls_of(student, layers, batches[0], run)
        bar = tqdm(calls, desc="fitting layers", disable=not progress)
        for path in bar:
            layer, unit = layers[path], paths[path]
            key = {"path": path, "n_masks": layer.mglu.n_masks, "tokens": tokens, "batches": len(batches)}
            key["sums"] = [float(matrix.double().sum()) for matrix in unit[:3]]
            file = None if place is None else place / f"{len(errors):04}.pt"
            made = load(file, key) if file is not None and file.exists() else None
            if made is None:
                x = inputs_of(student, layer, calls[path], batches, run, tokens, path)
                made = fit_unit(unit, x, layer.mglu.n_masks)
                if file is not None:
                    save(file, key, made)
            weight, masks, down, errors[path] = made
            layer.mglu.weight.copy_(weight)
            assert layer.mglu.mask_logits is not None
            layer.mglu.mask_logits.copy_(torch.where(masks, LOGITS_STD, -LOGITS_STD))
            layer.down_proj.weight.copy_(down)
            bar.set_postfix(error=f"{[*errors[path].values()][-1]:.4f}")
    return Conversion(student, {path: errors[path] for path in calls})


def call(model: nn.Module, batch: Any) -> object:
    """Call a model with a batch: a mapping of keyword arguments, a tuple of arguments, or one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode, and each module back to its own mode at the end."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class _ReachedError(Exception):
    """A model has called the layer whose inputs are wanted."""


def calls_of(model: nn.Module, layers: Mapping[str, nn.Module], batch: Any, run: Run) -> dict[str, int]:
    """The paths of layers in the order in which they first run, and how often each runs for a batch.

    A layer in several places has several paths, of which only one is returned.

    Raises:
        ValueError: a layer does not run.
    """
    path_of, calls = {layer: path for path, layer in layers.items()}, dict[str, int]()

    def count(module: nn.Module, *_: Any) -> None:
        calls[path_of[module]] = calls.get(path_of[module], 0) + 1

    hooks = [layer.register_forward_pre_hook(count) for layer in path_of]
    try:
        run(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    if missing := path_of.keys() - {layers[path] for path in calls}:
        raise ValueError(f"batches: got batches for which {path_of[missing.pop()]} does not run, must run all layers")
    return calls


def inputs_of(
    model: nn.Module, layer: MGLUFeedForward, calls: int, batches: Sequence[Any], run: Run, tokens: int, path: str
) -> Tensor:
    """A sample of the inputs of a layer, float32 `[at most about tokens, hidden]`, from each batch as many.

    Raises:
        ValueError: there are too few, or they are not finite.
    """
    found, share = list[Tensor](), -(-tokens // (len(batches) * calls))
    generator = torch.Generator().manual_seed(0)

    def keep(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        x: Tensor = [*arguments, *options.values()][0].flatten(0, -2)
        found.append(x[torch.randperm(len(x), generator=generator)[:share].to(x.device)].float())
        if len(found) % calls == 0:
            raise _ReachedError

    hook = layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        for batch in batches:
            with suppress(_ReachedError):
                run(model, batch)
    finally:
        hook.remove()
    x, least = torch.cat(found), layer.mglu.in_features
    if len(x) < least:
        raise ValueError(f"batches: got {len(x)} tokens for {path}, must be at least its hidden size, {least}")
    if not bool(x.isfinite().all()):
        raise ValueError(f"batches: got inputs of {path} that are NaN or infinite, must be finite")
    return x


def fit_unit(unit: GatedUnit, x: Tensor, n_masks: int) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
    """Fit a layer to the matrices of a gated linear unit. Returns its weight, masks, down projection and errors."""
    gate, up, down = (matrix.float() for matrix in unit[:3])
    act = get_activation(unit.activation)
    sample = Sample(x, F.linear(act.forward(F.linear(x, gate)) * F.linear(x, up), down), act)
    layer, errors = fit(Rows(gate, up, down, *sensitivities(gate, up, sample)), sample, n_masks)
    return layer.weight, layer.masks, layer.down, errors


def save(file: Path, key: Mapping[str, object], made: tuple[Any, ...]) -> None:
    """Write a fitted layer, so that a call that is stopped leaves a whole file or none."""
    part = file.with_suffix(".part")
    torch.save({"key": dict(key), "made": made}, part)
    part.replace(file)


def load(file: Path, key: Mapping[str, object]) -> tuple[Any, ...]:
    """Read a fitted layer.

    Raises:
        ValueError: it is of another conversion.
    """
    saved = torch.load(file, weights_only=True)
    if saved["key"] != key:
        different = ", ".join(f"{name} {saved['key'].get(name)}" for name in key if saved["key"].get(name) != key[name])
        raise ValueError(
            f"folder: got {file} of a conversion with {different}, must be of this one; take another folder"
        )
    made: tuple[Any, ...] = saved["made"]
    return made
