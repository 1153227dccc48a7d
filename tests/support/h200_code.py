"""Generates the code that Inductor generates for an H200, on a machine without a GPU: fake tensors, and a faked device.

The code is neither compiled nor run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

Shape = tuple[tuple[int, ...], torch.dtype]

_LIMITS = {
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "warp_size": 32,
}
_KERNEL = re.compile(r"@triton\.jit\ndef (triton_\w+)\(.*?\):\n(.*?)'''", re.DOTALL)


class TritonKernel(NamedTuple):
    """A generated kernel: its name, and its lines that access memory, wait, launch, or begin a loop or a branch."""

    name: str
    lines: list[str]

    @property
    def launches(self) -> bool:
        return any("gdc_launch_dependents" in line for line in self.lines)

    @property
    def waits_first(self) -> bool:
        """Whether the first of these lines is a wait, which is then outside of loops and branches."""
        return "gdc_wait" in self.lines[0]


def kernels_of(code: str) -> list[TritonKernel]:
    """The Triton kernels of a module that Inductor generated."""
    lines = r"gdc_|\btl\.(load|store|atomic|make_)|triton_helpers\.bucketize|^\s*(for|if|while)\b"
    return [
        TritonKernel(name, [line.strip() for line in body.splitlines() if re.search(lines, line)])
        for name, body in _KERNEL.findall(code)
    ]


@contextmanager
def h200(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Inside the block, Inductor takes the first CUDA device for an H200 (or a GPU of another compute capability)."""
    major, minor = capability
    for_kernels = DeviceProperties(type="cuda", index=0, cc=10 * major + minor, major=major, **_LIMITS)
    device = SimpleNamespace(
        name="H200", major=major, minor=minor, total_memory=1 << 37, shared_memory_per_block_optin=232448, **_LIMITS
    )
    with ExitStack() as stack:
        stack.enter_context(patch("torch.cuda.get_device_capability", lambda *_: capability))
        stack.enter_context(patch("torch.cuda.get_device_properties", lambda *_: device))
        stack.enter_context(patch("torch.cuda.current_device", lambda: 0))
        stack.enter_context(patch.object(DeviceProperties, "create", lambda _: for_kernels))
        stack.enter_context(patch("torch._inductor.scheduler.Scheduler.create_backend", _triton_backend))
        stack.enter_context(patch("torch.utils._triton.triton_hash_with_backend", lambda: "none"))
        yield


def _triton_backend(scheduler: Any, device: torch.device) -> Any:
    init_backend_registration()
    return get_scheduling_for_device(device.type)(scheduler)  # type: ignore[misc]


def h200_code(function: Callable[..., Any], inputs: Sequence[Shape], **settings: Any) -> str:
    """The module that Inductor generates for a function of tensors on an H200, under settings of Inductor."""
    with ExitStack() as stack:
        stack.enter_context(inductor_config.patch(settings))
        # With deterministic algorithms, which the tests enable, `index_put_` would be a call of another library.
        stack.enter_context(patch("torch.are_deterministic_algorithms_enabled", lambda: False))
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with mode:
            examples: list[Tensor] = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in inputs]
            traced = make_fx(function, decomposition_table=select_decomp_table())(*examples)
        graph = GraphLowering(traced, example_inputs=examples, is_inference=True, shape_env=mode.shape_env)
        for context in (DebugContext(), V.set_graph_handler(graph), V.set_fake_mode(mode), mode):
            stack.enter_context(context)
        graph.run(*examples)
        wrapper: Any = graph.codegen()[0]
    return str(getattr(wrapper, "value", wrapper))
