"""Programmatic dependent launch of Inductor's Triton kernels, in graphs with MGLU layers that run as CUDA graphs.

With programmatic dependent launch (compute capability 9.0 and later), the blocks of a kernel may be set up while the
kernel before it in the stream still runs. `gdc_wait` waits until that kernel has ended, and `gdc_launch_dependents`
lets the next kernel start. The CUDA kernels of this project are launched this way. Inductor's Triton kernels are
launched this way if `torch._inductor.config.triton.enable_pdl` is set, which is off by default. They then need Triton's
launcher, which takes more of the host's time than Inductor's static launcher. In a CUDA graph the host launches no
kernels, so this file turns the setting on there.

Under the setting alone, Inductor of torch 2.11 to 2.15 generates kernels that race (`_handle_pdl_before_access` and
`_handle_pdl_after_load` in torch/_inductor/codegen/triton.py):

- A kernel waits at the latest after its first load. It waits before that only if the last node of the schedule
  (`Scheduler.previous_node`) writes to the loaded buffer, by name, or is not a Triton kernel. It lets the next kernel
  start after its last load, and so before it stores.
- A kernel that updates a buffer in place writes to it under a new name. The next kernel loads from the buffer before it
  waits, because the names differ: it may read what was there before the update.
- A kernel that loads nothing (fill, arange) does not wait. It may end while the kernel before it still runs, and the
  wait of the kernel after it does not cover that one.
- A kernel with a loop may store before it waits, over memory that the kernel before it still reads under another name.

Therefore the scheduler of a graph that gets the setting reports no last node. Then Inductor puts a wait before each
load and each store, and in front of the loop if the access is in one, and keeps the first wait of a kernel. No kernel
skips it, because masks of accesses are predicates and not branches. So every kernel waits before its first access, and
only then lets the next one start. It sees everything that earlier kernels of the stream wrote: its wait lasts until the
kernel before it has ended, and that kernel waited in the same way. A kernel that only stores never lets the next one
start early. Kernels of other libraries are launched without the attribute, or wait themselves. The price is that no
load can run before the wait. A kernel after a GEMM or an MGLU layer has no such load anyway.

`_is_right` lists where this does not hold or was not checked. There the setting stays off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch._inductor import custom_graph_pass

SchedulerNodes = list[Any]
SchedulerPass = Callable[[SchedulerNodes], SchedulerNodes]

_SLOT = "_post_fusion_custom_pass"
_SETTING = "triton.enable_pdl"
_MIN_CAPABILITY = 9
_CHECKED = ((2, 11), (2, 15))
"""The first and the last version of torch whose generated code was checked."""

_UNCHECKED_SETTINGS = (
    "combo_kernels",
    "triton.cooperative_reductions",  # store, and wait, in a branch
    "triton.force_cooperative_reductions",
    "triton.multi_kernel",
)
"""Settings of Inductor that change how kernels are generated; the generated code was not checked with them."""

# Since torch 2.13 a scheduler pass must have this class to be cached; before, any callable could be.
_Base: Any = getattr(custom_graph_pass, "CustomSchedulerPass", object)


def settings_of_dependent_launch() -> dict[str, Any]:
    """The settings under which Inductor runs the pass of this file; empty where the pass could not help.

    Call this when the settings of a compilation are final, and restore them at its end, because the pass changes
    `enable_pdl`. If a user has set `enable_pdl`, it stays True and the pass does not run.
    """
    if not inductor_config.triton.cudagraphs or inductor_config.triton.enable_pdl or not _is_checked_torch():
        return {}
    if not _has_nvidia_gpu():
        return {}
    return {_SETTING: False, _SLOT: _in_the_slot(getattr(inductor_config, _SLOT))}


def _has_nvidia_gpu() -> bool:
    return torch.version.hip is None and torch.cuda.is_available()


def _is_checked_torch() -> bool:
    major, minor = torch.__version__.split(".")[:2]
    return _CHECKED[0] <= (int(major), int(minor)) <= _CHECKED[1]


def _in_the_slot(before: SchedulerPass | None) -> SchedulerPass:
    """The pass of this file, run after the one that is in the slot; it can be cached if that one can."""
    decide = DependentLaunch(before)
    if decide.uuid() is not None:
        return decide
    return lambda nodes: decide(nodes)  # a lambda cannot be pickled for a key, so nothing is cached


class DependentLaunch(_Base):
    """A pass of Inductor's scheduler that decides whether the kernels of its graph are launched dependently.

    It decides anew for each graph of a compilation, such as the forward and the backward graph. The code that is
    generated afterwards contains the decision, and takes it into compile caches and worker processes. The decision is
    a function of what is in the key of the caches: the graph, the settings, the device and the uuid.
    """

    def __init__(self, before: SchedulerPass | None = None) -> None:
        self.before = before

    def __call__(self, nodes: SchedulerNodes) -> SchedulerNodes:
        from torch._inductor.virtualized import V

        if self.before is not None:
            nodes = self.before(nodes)
        inductor_config.triton.enable_pdl = is_right = _is_right(V.graph, nodes)
        if is_right:
            _wait_before_each_access(V.graph.scheduler)
        return nodes

    def uuid(self) -> Any | None:
        """A key for compile caches; None if the earlier pass has none."""
        before = "" if self.before is None else getattr(self.before, "uuid", lambda: None)()
        return None if before is None else ("mglu_ops.DependentLaunch", _source_hash(), str(before))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.before, _source_hash())  # the cache key in torch 2.11 and 2.12 is the pickled pass


def _rebuild(before: SchedulerPass | None, _key: str) -> DependentLaunch:
    return DependentLaunch(before)


@cache
def _source_hash() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _is_right(graph: Any, nodes: Sequence[Any]) -> bool:
    """Whether the kernels of a graph should be launched dependently, as far as the graph and the settings tell."""
    from torch._inductor.graph import SubgraphLowering

    return (
        inductor_config.triton.cudagraphs
        and graph.disable_cudagraphs_reason is None
        and not graph.aot_mode
        and not graph.cpp_wrapper
        # The code of a subgraph (a branch of `torch.cond`) is generated in the middle of its graph's code, so the rest
        # of that graph loses the setting too. That is safe: kernels with and without it may follow each other.
        and not isinstance(graph, SubgraphLowering)
        and not any(getattr(inductor_config, name) for name in _UNCHECKED_SETTINGS)
        and any(_is_layer(node) for node in nodes)
        and all(_can_wait(node) for node in nodes)
    )


def _is_layer(node: Any) -> bool:
    """Whether a node calls MGLU in inference on a GPU that has dependent launch."""
    return getattr(node.node, "op_overload", None) is torch.ops.mglu.forward.default and _is_able(node.get_device())


def _is_able(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _MIN_CAPABILITY


def _can_wait(node: Any) -> bool:
    """Whether a node is not a Triton kernel, or is one that waits before its first memory access under the setting."""
    from torch._inductor.scheduler import (
        ExternKernelSchedulerNode,
        FusedSchedulerNode,
        NopKernelSchedulerNode,
        SchedulerNode,
    )

    if type(node) in (ExternKernelSchedulerNode, NopKernelSchedulerNode):
        return True
    if type(node) not in (SchedulerNode, FusedSchedulerNode):
        return False  # foreach, mix-order and nested reductions, a user's Triton kernel with an epilogue, groups
    return all(_part_can_wait(part) for part in node.get_nodes())


def _part_can_wait(node: Any) -> bool:
    """Whether part of a kernel runs on the CPU, or Inductor puts a wait before each of its memory accesses."""
    device = node.get_device()
    if device is None or device.type == "cpu":
        return device is not None
    return (
        _is_able(device)
        and not node.is_template()
        and not node.is_split_scan()  # has a workspace that the blocks share
        and not node._body.has_op("load_seed")  # the seed of random numbers, before which Inductor puts no wait
    )


def _wait_before_each_access(scheduler: Any) -> None:
    """Make a scheduler report no last node, as if each kernel came after one that Inductor did not generate."""
    scheduler.__class__ = _class_without_last_node(scheduler.__class__)


@cache
def _class_without_last_node(scheduler_class: type) -> type:
    def ignore(_scheduler: Any, _node: Any) -> None:
        """Ignore the last node, which Inductor sets after each node."""

    return type(scheduler_class.__name__, (scheduler_class,), {"previous_node": property(lambda _: None, ignore)})
