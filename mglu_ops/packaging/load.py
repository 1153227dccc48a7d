"""`load`, which checks a package before torch maps its code, and the inputs before each call."""

from __future__ import annotations

import platform
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import ops  # noqa: F401 (a package may call the operators)
from ..files import as_path
from .cpp_runtime import has_own_libstdcxx
from .inputs import Inputs
from .package import PackageInfo, WeightInfo, minor_version, read_info
from .seal import PackageError, check_seal


class Package:
    """A loaded package, which is called like the model.

    Several threads may call one package, but a lock makes its calls run one after another. torch's runner holds one
    instance of the model. Without the lock, a second call would wait in the runner for the first one while holding the
    GIL, which the first call may need to finish.

    Attributes:
        info: the package's description of itself.
    """

    def __init__(self, info: PackageInfo, inputs: Inputs, runner: Any) -> None:
        self.info = info
        self._inputs, self._runner = inputs, runner
        self._in_spec, self._out_spec = map(pytree.treespec_loads, runner.loader.get_call_spec())
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            TypeError: an input is not a dense tensor.
            ValueError: the arguments are not nested like the example's; or an input has another dtype, device, shape or
                value than the package was compiled for; or its storage was resized.
        """
        with torch.no_grad():
            tensors, written = self._inputs.tensors((args, kwargs), self._in_spec)
            with self._lock:
                results = self._runner.loader.boxed_run(tensors)
            for copy, given in written:
                given.copy_(copy)
        return pytree.tree_unflatten(results, self._out_spec)

    def __deepcopy__(self, memo: object) -> Package:
        """Return the package itself, because its machine code and weights cannot be copied."""
        return self


def load(
    path: str | Path,
    *,
    weights: str | Path | Mapping[str, Tensor] | None = None,
) -> Package:
    """Load a package of `mglu_ops.export`.

    Args:
        path: the package. It is code that runs in this process, so load only packages whose programs you would run. The
            checks find damage and mistakes, not malice.
        weights: for a package made with `weights=...`, that file, or its tensors as `load_weights` returns them.
            Packages that get the same tensors share them without a copy. torch 2.13 never frees tensors that it has
            given to a package, so load the weights only once (`load_weights`) if you load packages repeatedly.

    Returns:
        The package, which is called like the model.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError: an argument is not a path, or `weights` neither a path nor a mapping.
        PackageError: the package is damaged, was not made by this version of `export`, was made for another torch, CPU,
            device or GPU, was compiled with a C++ compiler that links libstdc++ statically, or needs weights that are
            missing or do not fit.
    """
    path = as_path("path", path)
    weights = weights if weights is None or isinstance(weights, Mapping) else as_path("weights", weights)
    info = read_info(path)
    _check_process(info)
    if has_own_libstdcxx(path):
        raise PackageError(
            f"{path} holds a copy of libstdc++ and would crash Python, because its C++ compiler links it "
            "statically; export it anew, with CXX set to a compiler that links libstdc++.so"
        )
    if info.embeds_weights != (weights is None):
        have = "has no weights in it: pass weights=" if weights is None else "has its own weights"
        raise PackageError(f"{path} {have}")
    inputs = Inputs(info)
    try:
        runner = torch._inductor.aoti_load_package(str(path))
    except Exception as error:  # torch's loader raises errors of many types
        first_line, *_ = str(error).strip().splitlines() or [type(error).__name__]
        raise PackageError(f"{path}: torch cannot load it: {first_line}") from error
    if weights is not None:
        _give_weights(runner, weights, info)
    return Package(info, inputs, runner)


def load_weights(path: str | Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Load the tensors of a weights file of `export`, by name, for several packages to share.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError: `path` is not a path.
        ValueError: there is no such device.
        PackageError: the file is damaged, or `export` did not write it.
    """
    path = as_path("path", path)
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: got {device!r}, must be a device such as 'cpu' or 'cuda'") from None
    check_seal(path, "weights")
    entries: dict[str, Tensor | tuple[str, Tensor]] = torch.load(path, map_location=device, weights_only=True)
    return {  # 8-bit floats are stored as a dtype's name and bytes
        name: entry if isinstance(entry, Tensor) else entry[1].view(getattr(torch, entry[0]))
        for name, entry in entries.items()
    }


def _give_weights(runner: Any, weights: str | Path | Mapping[str, Tensor], info: PackageInfo) -> None:
    tensors = weights if isinstance(weights, Mapping) else load_weights(weights, info.device)
    needed = set(runner.get_constant_fqns())
    if missing := needed - tensors.keys():
        raise PackageError(f"{info.path}: the weights lack {', '.join(sorted(missing))}")
    described = {weight.name: weight for weight in info.weights}
    for name in needed:
        _check_weight(info, described.get(name), name, tensors[name])
    runner.load_constants({name: tensors[name] for name in needed}, check_full_update=True, user_managed=True)


def _check_weight(info: PackageInfo, expected: WeightInfo | None, name: str, tensor: object) -> None:
    """Refuse a tensor with another shape, dtype or strides, which the package would read as if they were right."""
    if expected is None:
        raise PackageError(f"{info.path}: its description: weights: lacks {name!r}, which its code needs")
    found = type(tensor).__name__
    if isinstance(tensor, Tensor):
        is_dense = tensor.layout is torch.strided
        found = str(WeightInfo.of(name, tensor)) if is_dense else f"a tensor of the layout {tensor.layout}"
        if is_dense and WeightInfo.of(name, tensor) == expected and tensor.device.type == info.device:
            return
        found += f" on {tensor.device}"
    raise PackageError(f"{info.path}: weights: {name}: got {found}, must be {expected} on {info.device}")


_VECTORS = ("DEFAULT", "AVX2", "AVX512")
"""Vector instructions of x86, by torch's names. A CPU that has one of them also has all before it."""


def _check_process(info: PackageInfo) -> None:
    """Check that this torch, CPU and GPU can run the package. Missing CPU instructions would kill the process."""
    if minor_version(info.torch) != minor_version(torch.__version__):
        raise PackageError(
            f"{info.path} was compiled by torch {info.torch}, and this is {torch.__version__}; export it anew"
        )
    machine, vectors = platform.machine(), torch.backends.cpu.get_cpu_capability()
    runnable = _VECTORS[: _VECTORS.index(vectors) + 1] if vectors in _VECTORS else (vectors,)
    if info.cpu and not (info.cpu[0] == machine and info.cpu[1] in runnable):
        raise PackageError(f"{info.path} was compiled for a CPU {' '.join(info.cpu)}, and this is {machine} {vectors}")
    if info.device == "cpu":
        return
    if not torch.cuda.is_available():
        raise PackageError(f"{info.path} is for a GPU, and torch sees none here")
    assert info.arch is not None
    made, here = tuple(info.arch), torch.cuda.get_device_capability()
    if made != here:
        raise PackageError(
            f"{info.path} was compiled for compute capability {made[0]}.{made[1]}, and this GPU "
            f"({torch.cuda.get_device_name()}) has {here[0]}.{here[1]}; export it here"
        )
