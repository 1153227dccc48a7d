"""Makes packages call a C function of libmglu_ops.so for `mglu::forward`, without torch's dispatcher and its boxing.

Inductor derives the name of the C function from the name of the operator without its namespace. For `forward` that
would be `aoti_torch_cpu_forward`, which other libraries may use too. So the graph calls an operator of this module,
`mglu::mglu_forward`, which has the schema of `mglu::forward`. It is only compiled, and never run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from .. import ops
from ..given import Given

_lib = torch.library.Library("mglu", "FRAGMENT")
_lib.define(str(ops.forward._schema).split("::")[1].replace("forward", "mglu_forward", 1))
torch.library.register_fake("mglu::mglu_forward", lambda *args: ops.fake_result(Given(*args)), lib=_lib)

_OPERATOR = torch.ops.mglu.mglu_forward.default


def call_shim(module: GraphModule) -> None:
    """Make the layers of an exported graph call the shim."""
    for node in module.graph.find_nodes(op="call_function", target=ops.forward):
        node.target = _OPERATOR
    module.recompile()


def settings(device: str) -> dict[str, Any]:
    """Inductor's settings for a graph that calls the shim on the device "cpu" or "cuda"."""
    declaration = (
        f"AOTITorchError aoti_torch_{device}_mglu_forward(AtenTensorHandle x, AtenTensorHandle weight, "
        "AtenTensorHandle packed_masks, const char* activation, AtenTensorHandle* mask_weights, "
        "AtenTensorHandle* weight_scale, const char* weight_format, const char* activation_format, "
        "AtenTensorHandle* result)"
    )
    return {"aot_inductor.custom_ops_to_c_shims": {_OPERATOR: [declaration]}}
