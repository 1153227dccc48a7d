"""The Dynamo backend "mglu": Inductor with the pass turned on. A package entry point registers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch._inductor.config as inductor_config
from torch.fx import GraphModule

from mglu_ops import notices

from .entry import current_pass, fusion_report, used_in_thread
from .fusion import FusionPass

_OWN_OPTIONS = ("strict", "assume_binary")


def mglu(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Any:
    """Compile a graph for `torch.compile(model, backend="mglu", mode=..., options=...)`.

    Args:
        gm: the graph.
        example_inputs: the inputs of the graph.
        mode: a mode of the Inductor backend ("reduce-overhead", "max-autotune", ...).
        options: settings of Inductor, and options of `mglu_ops.enable_fusion`. Missing fusion options come from the
            enclosing `mglu_ops.fusion()` block, or outside of blocks from `enable_fusion`.

    Returns:
        The compiled graph. The pass adds the graph's layers to the report of the enclosing `mglu_ops.fusion()` block,
        or outside of blocks to `mglu_ops.fusion_report()`.
    """
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches: dict[str, Any] = dict(list_mode_options(mode)) if mode else {}
    patches.update(options or {})
    if patches.get("freezing") and not inductor_config.freezing:
        notices.warn(
            "mglu: the option `freezing` freezes nothing, because Dynamo reads torch._inductor.config.freezing when it "
            "captures a model, before it reads options; set that instead",
            stacklevel=2,
        )
    enclosing = current_pass() or FusionPass(fusion_report())
    own = {name: patches.pop(name, getattr(enclosing, name)) for name in _OWN_OPTIONS}
    with used_in_thread(FusionPass(enclosing.report, **own)):
        return compile_fx(gm, example_inputs, config_patches=patches)
