"""Converts trained SwiGLU models to MGLU models, with masks and weights fitted layer by layer to real inputs."""

from __future__ import annotations

import hashlib
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..activations import get_activation
from ..files import FileError, as_path, check_writable
from .conversion import GatedUnit, from_swiglu, gated_units
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
            intermediate size. An expert is fitted on the tokens of the sample that choose it, which should be as many.
        folder: a folder for the fitted layers. A call that was stopped goes on after the layers that are there. Layers
            of other feed-forward weights, batches or options are refused. Changes of `run`, or of other parts of the
            model, are not noticed.
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


@torch.inference_mode(False)  # tensors made in inference mode could not be fitted, nor the copy trained
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
    example.

    For each layer, the copy runs up to that layer with every batch. A model of L layers therefore runs about `L / 2`
    times with every batch. Besides the copy, the fit of a layer needs memory for the larger of these numbers of bytes:

    - `4 * tokens * (2 * hidden + 5 * intermediate)` for the sample;
    - about `4 * (n_masks + 3) * intermediate * (12288 + 2 * hidden)` for the steps of the fit.

    Args:
        model: a model, or a part of one, on one device. It is not changed. It may be in any training mode; the inputs
            are computed in evaluation mode.
        batches: what the model is called with, one after the other, for example tokens int64 `[sequences, length]`. A
            mapping gives keyword arguments, and a tuple gives arguments. Each batch is used once for each layer, so a
            call must not change it. Tokens for which the `attention_mask` of a mapping is 0 are left out of the sample.
            Without an `attention_mask` of shape `[sequences, length]`, sequences must have no padding.
        n_masks: number of masks, 1 to 16. They are learned masks, without a router.
        projections: names of the projections in a feed-forward layer, as in `from_swiglu`.
        options: the options of the fit, see `FitOptions`.

    Returns:
        The copy and the errors of its layers.

    Raises:
        TypeError: as in `from_swiglu`; or `batches` is not a sequence.
        ValueError: as in `from_swiglu`; there are fewer tokens than the hidden size; a layer does not run; its weights,
            inputs or results are not finite, or its fitted weights exceed the range of their dtype; or `folder` cannot
            be written, or has damaged files or layers of another conversion.
    """
    student = from_swiglu(model, n_masks, projections=projections)
    units = gated_units(model, projections)
    return fitted(model, student, units, batches, **options)


def check_batches(batches: object, tokens: object, hidden: int) -> None:
    if not isinstance(batches, Sequence):
        advice = "[batches] for one batch, or batches.split(8)" if isinstance(batches, Tensor) else "list(batches)"
        raise TypeError(
            f"batches: got {type(batches).__name__}, must be a sequence, because it is read once for each layer; take "
            f"{advice}"
        )
    if not batches:
        raise ValueError("batches: got none, must be at least one")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < hidden:
        raise ValueError(f"tokens: got {tokens!r}, must be an int of at least the hidden size, {hidden}")


def check_weights(units: Mapping[str, GatedUnit]) -> None:
    for path, unit in units.items():
        if not all(bool(matrix.isfinite().all()) for matrix in unit[:3]):
            raise ValueError(f"model: got weights of {path} that are NaN or infinite, must be finite")


def check_errors(errors: Mapping[str, float], path: str) -> None:
    if not all(map(math.isfinite, errors.values())):
        raise ValueError(
            f"model: got {path}, whose fit is NaN or infinite, must have weights and results whose squares float32 can "
            "hold"
        )


def check_range(layer: Any, path: str) -> None:
    for weight in (layer.mglu.weight, layer.down_proj.weight):
        if not bool(weight.isfinite().all()):
            raise ValueError(
                f"model: got {path} in {weight.dtype}, which cannot hold its fitted weights, must be in a dtype of a "
                "larger range; convert a copy in bfloat16 or float32"
            )


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

    paths = {path: units[module] for path, module in model.named_modules() if module in units}
    check_batches(batches, tokens, max(unit.gate.shape[-1] for unit in paths.values()))
    check_weights(paths)
    layers: dict[str, Any] = {path: student.get_submodule(path) for path in paths}
    run, errors = run or call, dict[str, dict[str, float]]()
    place, used = None if folder is None else made_folder(folder), None if folder is None else digest(batches)
    with in_evaluation_mode(student):
        calls = calls_of(student, layers, batches[0], run)
        bar = tqdm(calls, desc="fitting layers", disable=not progress)
        for path in bar:
            layer, unit = layers[path], paths[path]
            key = {"path": path, "n_masks": layer.mglu.n_masks, "tokens": tokens, "batches": used}
            file = None if place is None else place / f"{len(errors):04}.pt"
            key["weights"] = None if file is None else digest(unit)
            made = load(file, key) if file is not None and file.exists() else None
            if made is None:
                if file is not None:
                    check_writable("folder", file)
                x, ids = inputs_of(student, layer, calls[path], batches, run, tokens, path)
                fit_all = fit_unit if ids is None else partial(fit_experts, ids=ids)
                made = fit_all(unit, x, layer.mglu.n_masks)
                check_errors(made[3], path)
                if file is not None:
                    save(file, key, made)
            weight, masks, down, errors[path] = made
            layer.mglu.weight.copy_(weight)
            layer.mglu.mask_logits.copy_(torch.where(masks, LOGITS_STD, -LOGITS_STD))
            layer.down_proj.weight.copy_(down)
            check_range(layer, path)
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
    model: nn.Module, layer: Any, calls: int, batches: Sequence[Any], run: Run, tokens: int, path: str
) -> tuple[Tensor, Tensor | None]:
    """A sample of the inputs of a layer, float32 `[at most about tokens, hidden]`, from each batch as many.

    For a layer of experts, the experts of these tokens are the second result, int `[tokens, K]`.

    Raises:
        ValueError: there are too few, or they are not finite.
    """
    found, share = list[list[list[Tensor]]](), -(-tokens // (len(batches) * calls))
    generator, has_experts = torch.Generator("cpu").manual_seed(0), layer.mglu.weight.dim() == 3

    def keep(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = [*arguments, *options.values()][: 1 + has_experts]
        x, *ids = (without_padding(one.detach(), batch) for one in given)
        chosen = torch.randperm(len(x), generator=generator, device="cpu")[:share].to(x.device)
        found[-1].append([x[chosen].float(), *(one[chosen] for one in ids)])
        if len(found[-1]) == calls:
            raise _ReachedError

    hook = layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        for batch in batches:
            found.append([])
            with suppress(_ReachedError):
                run(model, batch)
    finally:
        hook.remove()
    x, *ids = map(torch.cat, zip(*(of_call for of_batch in found for of_call in of_batch), strict=True))
    least = layer.mglu.in_features
    if len(x) < least:
        raise ValueError(f"batches: got {len(x)} tokens for {path}, must be at least its hidden size, {least}")
    if not bool(x.isfinite().all()):
        raise ValueError(f"batches: got inputs of {path} that are NaN or infinite, must be finite")
    return x, (ids[0] if ids else None)


def without_padding(x: Tensor, batch: Any) -> Tensor:
    """Rows `[tokens, n]` of x `[..., n]`, without tokens that the attention mask of the batch leaves out."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.numel() == len(rows):
        return rows[mask.bool().to(x.device).flatten()]
    return rows


def fit_unit(unit: GatedUnit, x: Tensor, n_masks: int) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
    """Fit a layer to the matrices of a gated linear unit. Returns its weight, masks, down projection and errors."""
    gate, up, down = (matrix.float() for matrix in unit[:3])
    act = get_activation(unit.activation)
    # The caller's autocast would fit in 16 bits, and its default device would hold parts of the optimizer's state.
    with x.device, torch.autocast(x.device.type, enabled=False):
        sample = Sample(x, F.linear(act.forward(F.linear(x, gate)) * F.linear(x, up), down), act)
        layer, errors = fit(Rows(gate, up, down, *sensitivities(gate, up, sample)), sample, n_masks)
    return layer.weight.to(unit.gate.dtype), layer.masks, layer.down.to(unit.down.dtype), errors


def fit_experts(
    unit: GatedUnit, x: Tensor, n_masks: int, ids: Tensor
) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
    """Fit each expert to its matrices on the tokens that chose it. Returns stacked tensors, and the mean errors.

    An expert of fewer tokens than the hidden size takes others too, up to that number.
    """
    found = []
    for expert, matrices in enumerate(zip(*unit[:3], strict=True)):
        is_own = (ids == expert).any(-1)
        first = is_own.int().argsort(descending=True, stable=True)  # its own tokens come first
        own = x[first[: max(int(is_own.sum()), x.shape[1])]]
        found.append(fit_unit(GatedUnit(*matrices, unit.activation), own, n_masks))
    *layers, errors = zip(*found, strict=True)
    weight, masks, down = map(torch.stack, layers)
    return weight, masks, down, {name: sum(one[name] for one in errors) / len(errors) for name in errors[0]}


def made_folder(folder: object) -> Path:
    """Make the folder for fitted layers, if it is not there.

    Raises:
        FileError: it cannot be made.
    """
    place = as_path("folder", folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"folder: got {place}, must be a folder, or a path where one can be made: {error}") from None
    return place


def digest(value: object) -> str:
    """A hash of the tensors, numbers and words in a value. Of other objects, only the type counts."""
    if isinstance(value, Mapping):
        parts = [f"{key}: {digest(one)}" for key, one in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        parts = [digest(one) for one in value]
    elif isinstance(value, Tensor):
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(value.element_size(), torch.int64)
        bits = value.detach().flatten().contiguous().view(integer)
        places = torch.arange(len(bits), device=bits.device).mul_(2).add_(1)
        # Integers overflow in the same way in any order of summation; a sum of floats would depend on the threads.
        parts = [str(value.dtype), str([*value.shape]), str(int(places.mul_(bits).sum()))]
    else:
        parts = [repr(value) if isinstance(value, (str, bytes, int, float)) else type(value).__name__]
    return hashlib.sha256(" ".join([type(value).__name__, *parts]).encode()).hexdigest()[:16]


def save(file: Path, key: Mapping[str, object], made: tuple[Any, ...]) -> None:
    """Write a fitted layer, so that a call that is stopped, or runs beside another, leaves a whole file or none.

    Raises:
        FileError: it cannot be written, for example because the disk is full.
    """
    part = file.with_suffix(f".{uuid.uuid4().hex}.part")
    try:
        torch.save({"key": dict(key), "made": made}, part)
        part.replace(file)
    except (OSError, RuntimeError) as error:  # torch raises a RuntimeError if the disk is full
        raise FileError(f"folder: {file} cannot be written; is the disk full? {error}") from error
    finally:
        part.unlink(missing_ok=True)


def load(file: Path, key: Mapping[str, object]) -> tuple[Any, ...]:
    """Read a fitted layer.

    Raises:
        FileError: it is damaged.
        ValueError: it is of another conversion.
    """
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        found, made = dict(saved["key"]), tuple(saved["made"])
    except Exception as error:
        raise FileError(
            f"folder: got {file}, which cannot be read ({type(error).__name__}), must be a file of convert; delete it, "
            "and its layer is fitted again"
        ) from error
    if found != key:
        different = ", ".join(f"{name} {found.get(name)}" for name in key if found.get(name) != key[name])
        raise ValueError(
            f"folder: got {file} of a conversion with {different}, must be of this one; take another folder"
        )
    return made
