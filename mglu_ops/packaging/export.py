"""`export`, which compiles a model into a package of machine code, with the masks of its MGLU layers packed."""

from __future__ import annotations

import inspect
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import notices
from ..backends.cpu.build import BuildError, as_program, find_compiler
from ..backends.triton import Triton
from ..files import as_path, check_writable
from ..formats import round_activation
from ..given import Given
from ..masks import check_packed_masks
from ..words import described
from .cpp_runtime import has_own_libstdcxx
from .describe import arguments_of, conditions_of_code, describe, fake_arguments_of, tensors_of
from .inputs import dense_order
from .load import load_weights
from .package import LayerInfo, PackageInfo, seal_package
from .seal import PackageError, seal

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph

BACKENDS = ("auto", "cpu", "cuda", "triton", "composite")


def export(
    model: nn.Module | ExportedProgram,
    example_inputs: Sequence[Any],
    path: str | Path,
    dynamic_tokens: bool = True,
    backend: str = "auto",
    *,
    dynamic_shapes: Any = None,
    weights: str | Path | None = None,
    strict: bool = False,
    assume_binary: bool = False,
    inductor_options: Mapping[str, Any] | None = None,
) -> PackageInfo:
    """Compile a model for inference into a `.pt2` package, which `mglu_ops.load` and C++ programs run.

    MGLU layers, written naively or as modules of `mglu_ops.nn`, become calls of `mglu::forward`. Their masks are
    packed: the package holds one bit per weight and mask, and no logits. Calls of `mglu::forward` and of the operators
    over experts stay, with weights and x in any format of `mglu_ops.formats`. Experts with learned masks become
    `mglu::grouped_forward`. The model does not change.

    A package is code: whoever loads it runs what it holds.

    Args:
        model: a module, also one that `torch.compile` returned, or a program of `torch.export.export` (with grad mode
            on or off), whose dynamic shapes are then kept. It is compiled in its current mode, as by `torch.export`,
            with a warning if that is training mode.
        example_inputs: positional inputs of the model, on the device to compile for. The code is compiled for their
            order of dimensions in memory; a call copies inputs of another order.
        path: the package to write, which must end in `.pt2`; its folder must exist. An existing package is replaced
            when the new one is complete.
        dynamic_tokens: let all sizes vary from 1 up where the model allows it, except the last size of floating inputs
            (the features). If False, the package takes only the shapes of `example_inputs`.
        backend: what runs the layers. "cpu" and "cuda" call the operator, which mglu_ops provides in a Python process
            and `libmglu_ops.so` in any other. "triton" (GPU) and "composite" (matrix products, any device) are compiled
            into the package, which then needs no operator library, but cannot run experts. "auto" is the operator of
            the inputs' device.
        dynamic_shapes: the argument `dynamic_shapes` of `torch.export.export`, in place of `dynamic_tokens`.
        weights: a file for the parameters and packed masks, which are then not in the package. `mglu_ops.load` needs
            it. Packages that are made with the same file share its tensors. If the file exists, it is extended.
        strict: raise an error if a recognised layer cannot be fused. If False, warn and compile it unfused.
        assume_binary: see `mglu_ops.enable_fusion`. The values of constant masks are always checked.
        inductor_options: further settings of Inductor.

    Returns:
        The description that is stored in the package.

    Raises:
        ValueError: an argument is wrong, torch cannot export the model with these inputs, no layer was fused, none of
            the sizes can vary, or a file cannot be written.
        TypeError: `path` or `weights` is not a path.
        compile_passes.fusion.FusionError: with `strict`, a layer was not fused.
        BuildError: no C++ compiler was found.
        PackageError: the file `weights` is damaged, or `export` did not write it.
    """
    from ..passes import FusionReport, fuse_exported, layers_of

    path = as_path("path", path)
    weights = None if weights is None else as_path("weights", weights)
    options = {} if inductor_options is None else inductor_options
    model = getattr(model, "_orig_mod", model)  # unwrap torch.compile's module, whose forward takes *args
    _check_arguments(model, example_inputs, backend, options)
    _check_files(path, weights)
    compiler = _compiler(options)
    report = FusionReport()
    with _replacing("path", path) as unfinished, torch.no_grad(), _quiet():
        program = _exported(model, tuple(example_inputs), dynamic_tokens, dynamic_shapes)
        device = _device(program)
        fused = fuse_exported(program, report=report, strict=strict, assume_binary=assume_binary)
        if not layers_of(fused.graph):
            raise ValueError("model: no MGLU layer was found in it" + "".join(f"; {site}" for site in report.missed))
        _check_masks(fused)
        backend = device.type if backend == "auto" else backend
        _check_backend(backend, device)
        _check_experts(fused, backend)
        info = describe(program, fused, path, device, backend, weights is None)
        if backend == "triton":
            _check_triton(info.layers, device)
        info.missed.extend(" ".join(str(site).split()) for site in report.missed)
        for reason in [*_signs_of_training(model), *info.missed]:
            notices.warn(f"mglu_ops.export: {reason}", stacklevel=2)
        if weights is not None:
            _store_weights(fused, weights)
        _compile(program, fused, info, {**options, **compiler}, unfinished)
        seal_package(unfinished, info)
    if has_own_libstdcxx(path):
        notices.warn(
            f"mglu_ops.export: Python cannot load {path}, only C++ programs can, because the C++ compiler links "
            "libstdc++ statically; for Python, set CXX to a compiler that links libstdc++.so",
            stacklevel=2,
        )
    return info


def _check_arguments(model: Any, example_inputs: Any, backend: Any, options: Any) -> None:
    if not isinstance(model, (nn.Module, torch.export.ExportedProgram)):
        raise ValueError(f"model: got {type(model).__name__}, must be a torch.nn.Module or an ExportedProgram")
    if not isinstance(example_inputs, (tuple, list)):
        raise ValueError(f"example_inputs: got {described([example_inputs])}, must be a tuple of the model's inputs")
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, must be one of {', '.join(BACKENDS)}")
    if not isinstance(options, Mapping):
        raise ValueError(f"inductor_options: got {type(options).__name__}, must be a mapping of names to settings")
    if unknown := options.keys() - set(torch._inductor.list_options()):
        raise ValueError(f"inductor_options: got {min(map(str, unknown))}, which torch._inductor.config does not have")


def _check_files(path: Path, weights: Path | None) -> None:
    """Check that files can be written, before minutes of compiling."""
    if path.suffix != ".pt2" or path.stem in (".", ".."):  # torch uses the stem as the archive's top folder
        raise ValueError(f"path: got {path}, must be a name that ends in .pt2")
    check_writable("path", path)
    if weights is not None:
        if weights.resolve() == path.resolve():
            raise ValueError(f"weights: got {weights}, must be another file than the package")
        check_writable("weights", weights)


@contextmanager
def _replacing(name: str, path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces `path` at the end unless there is an error.

    Readers always find the old or the new file, and never half of one. The temporary file has the same name, in a new
    folder `.NAME.*.tmp` beside `path`, which stays if the process is killed.
    """
    target = path.resolve()
    try:
        folder = tempfile.TemporaryDirectory(prefix=f".{path.name}.", suffix=".tmp", dir=target.parent)
    except OSError as error:
        raise ValueError(f"{name}: {path} cannot be written: {error.strerror} in {target.parent}") from None
    with folder as inside:
        unfinished = Path(inside, path.name)  # the same name, since torch uses its stem as the archive's top folder
        yield unfinished
        os.replace(unfinished, target)


def _compiler(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return Inductor's setting of the C++ compiler: from `options`, else from `CXX`, else torch's default.

    A missing compiler is an error here, before minutes of tracing.
    """
    from torch._inductor import config, cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    setting = {"cpp.cxx": options.get("cpp.cxx", config.cpp.cxx)}
    if "cpp.cxx" not in options and os.environ.get("CXX", "").strip():
        setting = {"cpp.cxx": (as_program(find_compiler(), Path(cache_dir())),)}
    try:
        with config.patch(setting):
            cpp_builder.get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise BuildError("no C++ compiler: torch compiles packages with g++; install it, or set CXX") from error
    return setting


def _check_backend(backend: str, device: torch.device) -> None:
    if backend in ("cpu", "cuda") and backend != device.type:
        raise ValueError(f"backend: got {backend!r}, but the model is on {device.type}")
    if backend == "triton" and device.type != "cuda":
        raise ValueError(f"backend: got 'triton', which is for GPUs, but the model is on {device.type}")


def _check_experts(program: ExportedProgram, backend: str) -> None:
    """Check that the backend supports the program's operators over experts, which a package can only call."""
    called = [node.target.name() for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    name = next((name for name in called if name.startswith(("mglu::experts_", "mglu::grouped_"))), None)
    if name is not None and backend in _RULES:
        raise ValueError(f"backend: got {backend!r}, which has no code for the model's {name}; must be 'cpu' or 'cuda'")


def _check_triton(layers: Sequence[LayerInfo], device: torch.device) -> None:
    """Check that the Triton kernels, which are compiled into the package, take all layers."""
    for layer in layers:
        if problem := Triton().reason("forward", layer.call(device, tokens=1)):
            raise ValueError(f"backend: got 'triton', which cannot take a layer of the model: {problem}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warnings about its own use of deprecated functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


# --- Programs -------------------------------------------------------------------------------------------------------


def _exported(
    model: nn.Module | ExportedProgram, inputs: tuple[Any, ...], dynamic_tokens: bool, dynamic_shapes: Any
) -> ExportedProgram:
    if not isinstance(model, nn.Module):
        return model
    import torch.fx.experimental._config as symbolic
    from torch.utils import _pytree as pytree

    inputs = pytree.tree_map_only(Tensor, _dense, inputs)
    if dynamic_shapes is not None or not dynamic_tokens:
        return _torch_export(model, inputs, dynamic_shapes)
    inputs = pytree.tree_map_only(Tensor, _enlarged, inputs)
    shapes = torch.export.ShapesCollection()  # works for any signature, also `*args`
    for value in pytree.tree_leaves(inputs):
        if isinstance(value, Tensor):
            shapes[value] = _varying(value)
    # Without this setting, torch assumes that dynamic sizes are never 0 or 1.
    with symbolic.patch(backed_size_oblivious=True):  # type: ignore[attr-defined] # a config module's
        program = _torch_export(model, inputs, shapes)
    if not program.range_constraints:
        raise ValueError(
            "dynamic_tokens: the model fixes every size of its inputs; pass dynamic_tokens=False, or dynamic_shapes to "
            "hear from torch.export why"
        )
    return program


def _torch_export(model: nn.Module, inputs: tuple[Any, ...], shapes: Any) -> ExportedProgram:
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*inputs)
    except TypeError as error:
        raise ValueError(
            f"example_inputs: got {described(inputs)}, must be positional inputs of forward{signature}: {error}; for a "
            "model with inputs by keyword, give the program of torch.export.export(model, args, kwargs) as model"
        ) from None
    try:
        return torch.export.export(model, inputs, dynamic_shapes=shapes)
    except Exception as error:  # runs the user's code, which may raise any error
        reason, *_ = str(error).strip().splitlines() or [""]
        raise ValueError(
            f"model: torch.export.export failed on example_inputs {described(inputs)}: {type(error).__name__}: {reason}"
        ) from None  # the traceback of torch's error would have 200 lines


def _dense(value: Tensor) -> Tensor:
    """Make a tensor contiguous if its strides leave gaps or overlap.

    torch compiles code for the strides of the example, and `Inputs` gives tensors only strides without gaps.
    """
    has_gaps = value.layout is torch.strided and dense_order(value.shape, value.stride()) is None
    return value.contiguous() if has_gaps else value


def _signs_of_training(model: nn.Module | ExportedProgram) -> list[str]:
    """List the signs that a model would be compiled in training mode: its mode, or operators traced in that mode."""
    if isinstance(model, nn.Module):
        how = "the model is in training mode, and is compiled so, with dropout and the like; call model.eval() before"
        return [how] if model.training else []
    names = []
    for node in model.graph.nodes:
        given = arguments_of(node)
        if given.get("train") is True or given.get("training") is True or given.get("dropout_p", 0.0) != 0.0:
            names.append(node.name)
    how = f"the program was exported in training mode, and is compiled so: {', '.join(names)}; call model.eval() before"
    return [how] if names else []


_SMALLEST_EXAMPLES = (2, 3, 5, 7)
"""The smallest values of the first, second, ... dynamic size of an example."""


def _enlarged(value: Tensor) -> Tensor:
    """Repeat the elements of a tensor until all dynamic sizes are above 1.

    If a dynamic size is 1 in the example, torch 2.13 compiles code that is correct only for 1.
    """
    for dim in _varying(value):
        wanted = _SMALLEST_EXAMPLES[min(dim, 3)]
        if value.shape[dim] == 1:
            value = value.repeat_interleave(wanted, dim)
        elif value.shape[dim] == 0:
            value = value.new_zeros((*value.shape[:dim], wanted, *value.shape[dim + 1 :]))
    return value


def _varying(value: Tensor) -> dict[int, Any]:
    """The dynamic dimensions of a tensor, for `torch.export`: all except the last one of a floating tensor."""
    fixed = 1 if value.is_floating_point() else 0
    return dict.fromkeys(range(value.dim() - fixed), torch.export.Dim.AUTO)


def _device(program: ExportedProgram) -> torch.device:
    devices = {
        node.meta["val"].device
        for node in program.graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("val"), Tensor)
    }
    types = {device.type for device in devices}
    if len(types) != 1 or not types <= {"cpu", "cuda"}:
        names = ", ".join(sorted(str(device) for device in devices))
        raise ValueError(f"model: its tensors and inputs are on {names}; they must be on one CPU or CUDA device")
    return devices.pop()


def _check_masks(program: ExportedProgram) -> None:
    """Check the packed masks that the model itself contains. All other packed masks come from `fuse_exported`."""
    from ..passes import layers_of

    tensors = tensors_of(program)
    names = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    for layer in layers_of(program.graph):
        name = names.get(arguments_of(layer)["packed_masks"].name)
        if name is None:
            continue  # an input of the model
        masks = tensors[name]
        try:
            in_rows = masks.flatten(0, -3) if masks.dim() > 3 else masks  # the rows of all experts
            check_packed_masks(in_rows, int(fake_arguments_of(layer).x.shape[-1]))
        except (TypeError, ValueError) as error:
            raise ValueError(f"model: {name}: {str(error).removeprefix('packed_masks: ')}") from None


# --- Compiling ------------------------------------------------------------------------------------------------------


def _compile(
    program: ExportedProgram, fused: ExportedProgram, info: PackageInfo, options: dict[str, Any], path: Path
) -> None:
    """Compile `fused`, the program after fusion, and add the conditions of its code to the description."""
    from torch._inductor.exc import InductorError

    def add_conditions(graph: Graph) -> None:
        for each in given if isinstance(given, (list, tuple)) else [given] if given else []:
            each(graph)
        info.conditions.extend(conditions_of_code(graph, program, info.inputs))
        torch._inductor.config.aot_inductor.metadata.update(info.texts())

    ranges = [size for entry in info.inputs for size in entry.shape if not isinstance(size, int)]
    if any(low < 2 for low, _, _ in ranges):
        # The optional checks of inputs in the code (AOTI_RUNTIME_CHECK_INPUTS) would refuse a size of 1, because torch
        # assumes that dynamic sizes are above 1.
        options.setdefault("aot_inductor.check_lowerbound", False)
    options["aot_inductor.metadata"] = {**options.get("aot_inductor.metadata", {}), **info.texts()}
    given = options.get("post_grad_custom_post_pass", torch._inductor.config.post_grad_custom_post_pass)
    options["post_grad_custom_post_pass"] = add_conditions
    if not info.embeds_weights:
        options["aot_inductor.package_constants_in_so"] = False
    with _layers_as_code(info.backend), _symbols_in_integers():
        try:
            torch._inductor.aoti_compile_and_package(fused, package_path=str(path), inductor_configs=options)
        except InductorError as error:
            if isinstance(error.inner_exception, PackageError):  # from conditions_of_code
                raise ValueError(str(error.inner_exception)) from None
            raise


@contextmanager
def _symbols_in_integers() -> Iterator[None]:
    """Make Inductor compute symbols from the sizes of inputs by integer division.

    If an input has `49 * b` rows, torch 2.13 generates `b = (1.0 / 49.0) * rows`. For 13 * 49 rows that is 12.99...,
    which the code truncates to 12.
    """
    import sympy
    from torch.utils._sympy import solve
    from torch.utils._sympy.functions import FloorDiv, Max

    def exactly(*args: Any, **kwargs: Any) -> Any:
        if (solution := try_solve(*args, **kwargs)) is None:
            return None
        relation, value = solution
        dividend, divisor = sympy.fraction(sympy.together(value))
        # The divisor may be the size of another input, which may be 0.
        return relation, FloorDiv(dividend, Max(1, divisor))

    try_solve, solve.try_solve = solve.try_solve, exactly
    try:
        yield
    finally:
        solve.try_solve = try_solve


@contextmanager
def _layers_as_code(backend: str) -> Iterator[None]:
    """Replace `mglu::forward` by the code of the backend while Inductor traces a program."""
    if backend not in ("triton", "composite"):
        yield
        return
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    library = torch.library.Library("mglu", "FRAGMENT")
    try:
        torch.library.register_torch_dispatch("mglu::forward", FunctionalTensorMode, _RULES[backend], lib=library)
        yield
    finally:
        library._destroy()


def _triton_rule(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    from ..backends.triton.configs import choose
    from ..backends.triton.launch import launch

    given = Given(*args, **(kwargs or {}))
    with mode:
        if given.activation_format != "dense":
            given = given._replace(x=round_activation(given.x))
        in_rows = given.in_rows()
        tokens = in_rows.x.shape[0]
        # If the number of tokens varies, the launch for 16 tokens is chosen, which can run any number.
        chosen = choose(given.n_masks, tokens if isinstance(tokens, int) else 16, wide=given.x.dtype is torch.float32)
        return launch(in_rows, chosen).view(*given.x.shape[:-1], given.out_features)


def _composite_rule(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    from . import composite

    with mode:
        return composite.forward(Given(*args, **(kwargs or {})))


_RULES = {"triton": _triton_rule, "composite": _composite_rule}


def _store_weights(program: ExportedProgram, path: Path) -> None:
    """Add a program's tensors to a weights file."""
    found = {name: value.detach().cpu() for name, value in tensors_of(program).items()}
    stored = load_weights(path) if path.exists() else {}
    for name in found.keys() & stored.keys():
        if found[name].dtype != stored[name].dtype or not torch.equal(_bits(found[name]), _bits(stored[name])):
            raise ValueError(f"weights: {path} holds another {name}; packages that share a file share their tensors")
    with _replacing("weights", path) as unfinished:
        torch.save({name: _entry(value) for name, value in {**stored, **found}.items()}, unfinished)
        seal(unfinished, "weights")


def _entry(tensor: Tensor) -> Tensor | tuple[str, Tensor]:
    """A tensor as stored in weights files: 8-bit floats, which C++ cannot read, become a dtype's name and bytes."""
    bits = _bits(tensor)
    return tensor if bits is tensor else (str(tensor.dtype).removeprefix("torch."), bits)


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of 8-bit floats, which torch can compare and C++ can read; any other tensor unchanged."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
