"""`mglu::forward` as a C function of libmglu_ops.so, which a package calls without a dispatcher and its boxing.

Inductor derives a C function's name from an operator's, without the namespace: `forward` would be
`aoti_torch_cpu_forward`, which anyone's may be. So a package that calls the shim has `mglu::mglu_forward` in its graph,
an operator with the schema of `mglu::forward` that exists to be compiled and never runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from .. import ops

_lib = torch.library.Library("mglu", "FRAGMENT")
_lib.define(str(ops.forward._schema).split("::")[1].replace("forward", "mglu_forward", 1))
torch.library.register_fake("mglu::mglu_forward", ops._forward_fake, lib=_lib)

_OPERATOR = torch.ops.mglu.mglu_forward.default


def call_shim(module: GraphModule) -> None:
    """Let the layers of an exported graph call the shim."""
    for node in module.graph.find_nodes(op="call_function", target=ops.forward):
        node.target = _OPERATOR
    module.recompile()


def settings(device: str) -> dict[str, Any]:
    """Inductor's settings for it."""
    declaration = (
        f"AOTITorchError aoti_torch_{device}_mglu_forward(AtenTensorHandle x, AtenTensorHandle weight, "
        "AtenTensorHandle packed_masks, const char* activation, AtenTensorHandle* route_weights, "
        "AtenTensorHandle* result)"
    )
    return {"aot_inductor.custom_ops_to_c_shims": {_OPERATOR: [declaration]}}
