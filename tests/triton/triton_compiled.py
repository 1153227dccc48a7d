"""Compiles Triton kernels for GPUs that need not be present."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mglu_ops.backends.triton import grouped, launch
from mglu_ops.formats import FORMATS
from mglu_ops.given import Given

_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.uint8: "u8", torch.int32: "i32"}
_TYPES |= {torch.float8_e4m3fn: "fp8e4nv", torch.int8: "i8"}


class _Recorder:
    """A fake kernel that records the arguments of its launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        def record(*args: Any, **kwargs: Any) -> None:
            self.args, self.kwargs = args, kwargs

        return record


def compile_kernel(n_masks: int, tokens: int, dtype: torch.dtype, capability: int, weight_format: str = "dense") -> Any:
    """Compile the kernel that the backend launches for 1024 x 1024 weights."""
    x = torch.empty(tokens, 1024, dtype=dtype)
    weight, scale = FORMATS[weight_format].quantize(torch.zeros(1024, 1024, dtype=dtype))
    packed = torch.empty(1024, 128, n_masks, dtype=torch.uint8)
    recorders = {name: _Recorder(getattr(launch, name)) for name in ("matvec_kernel", "matmul_kernel")}
    with mock.patch.multiple(launch, **recorders):
        launch.launch(Given(x, weight, packed, "silu", None, scale, weight_format), None)
    (used,) = (recorder for recorder in recorders.values() if hasattr(recorder, "args"))
    return _compile(used.kernel, used.args, used.kwargs, capability)


def compile_products_of_experts(
    function: str, in_features: int, capability: int, dtype: torch.dtype = torch.bfloat16, tf32: bool = False
) -> Any:
    """Compile the kernel of `grouped_products` or `products_over_rows` for 128 experts."""
    x, y = (torch.empty(1024, columns, dtype=dtype) for columns in (in_features, 768))
    weight = torch.empty(128, 768, in_features, dtype=dtype)
    kernel = f"{function}_kernel"
    recorder, tile = _Recorder(getattr(grouped, kernel)), grouped.tile_of(dtype, capability // 10)
    replaced = {kernel: recorder, "_tile": lambda a: tile, "rounds_to_tf32": lambda a: tf32}
    with mock.patch.multiple(grouped, **replaced):
        operands = (x, weight.mT) if function == "grouped_products" else (y, x)
        getattr(grouped, function)(*operands, torch.empty(128, dtype=torch.int32))
    return _compile(recorder.kernel, recorder.args, recorder.kwargs, capability)


def _compile(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], capability: int) -> Any:
    """Compile a kernel, specialised for arguments that are 1, None or multiples of 16, as Triton's launcher does."""
    options = {name: kwargs[name] for name in ("num_warps", "num_stages")}
    constants = {name: value for name, value in kwargs.items() if name not in options}
    signature: dict[str, str] = dict.fromkeys(constants, "constexpr")
    attributes = {}
    for position, (name, arg) in enumerate(zip(kernel.arg_names, args, strict=False)):
        if isinstance(arg, Tensor):
            signature[name] = "*" + _TYPES[arg.dtype]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif arg is None or arg == 1:
            signature[name], constants[name] = "constexpr", arg
        else:
            signature[name] = "i32"
            if arg % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
    positions = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    signature = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=positions, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def spills(compiled: Any) -> int:
    """The size of a thread's stack in bytes, which holds spilled registers."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [tools / "cuobjdump", "-res-usage", cubin.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True)
    match = re.search(r"STACK:(\d+)", report.stdout + report.stderr)
    assert match, report.stdout + report.stderr
    return int(match.group(1))


def loop_of(compiled: Any) -> str:
    """The body of the kernel's loop in TTGIR, after Triton has chosen layouts."""
    ir: str = compiled.asm["ttgir"]
    return ir[ir.index("scf.for") : ir.rindex("scf.yield")]
