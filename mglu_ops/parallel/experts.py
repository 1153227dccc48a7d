"""Tensor and expert parallelism of experts: each rank computes a term of the weighted sum over a token's experts."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle

from ..nn.arguments import check_rows_of_ranks
from ..nn.experts import MGLUExperts, MGLUExpertsFeedForward
from .colwise import place

BY_EXPERTS: dict[str, Placement] = dict.fromkeys(("weight", "weight_scale", "mask_logits", "packed_masks"), Shard(0))
BY_ROWS: dict[str, Placement] = {**dict.fromkeys(BY_EXPERTS, Shard(1)), "mask_logits": Shard(2)}
DIVISIONS = {"experts": (BY_EXPERTS, Shard(0)), "rows": (BY_ROWS, Shard(2))}
"""The placements of the tensors of `MGLUExperts`, and of `down_proj`, for each way to divide a layer."""


class ParallelExperts(ParallelStyle):
    """Divide an `MGLUExpertsFeedForward` over ranks, for `parallelize_module`.

        parallelize_module(block, mesh, {"mlp": ParallelExperts("experts")})

    With `"experts"` (expert parallelism), each rank holds its share of the experts, with their masks and projections.
    With `"rows"` (tensor parallelism), each rank holds the same rows of every expert, which are intermediate features,
    and the same columns of its projection. The routers of experts and of masks are on every rank.

    All ranks have all tokens and route them alike; each computes what its experts or rows contribute, and the results
    are summed over the ranks. So is the gradient of x. No shape depends on the routing, and nothing waits for a GPU.

    Layers with learned, fixed and frozen masks are divided alike, before or after `mglu_ops.freeze`. So are quantized
    ones with their scales, before or after `mglu_ops.quantize`; a rank's rows in `fp8_block` must be a multiple of 128.

    Args:
        divide: `"experts"` or `"rows"`.
        input_layouts: placement of x `[..., hidden_size]`: replicated by default; `Shard(1)` if each rank has a part
            of the sequence of x `[batch, sequence, hidden_size]`, which is then gathered.
        output_layouts: placement of the result, likewise; `Shard(1)` scatters the sum. The logits of
            `output_router_logits` are of all tokens.

    Raises:
        ValueError: `divide` is neither of the two; or (by `parallelize_module`) the number of ranks does not divide
            num_experts or intermediate_size, or would cut blocks of `fp8_block`.
        TypeError: (by `parallelize_module`) the module is not an `MGLUExpertsFeedForward`.
    """

    def __init__(
        self, divide: str, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None
    ) -> None:
        if divide not in DIVISIONS:
            raise ValueError(f"divide: got {divide!r}, must be 'experts' or 'rows'")
        super().__init__()
        self.divide = divide
        self.input_layouts, self.output_layouts = input_layouts or Replicate(), output_layouts or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MGLUExpertsFeedForward):
            raise TypeError(
                f"module: got {type(module).__name__}, must be an MGLUExpertsFeedForward for ParallelExperts"
            )
        divide(module, module.experts, self.divide, device_mesh, self.src_data_rank)
        # This replicates the parameters of the routers.
        return distribute_module(module, device_mesh, None, self._gathered, self._summed)

    def _gathered(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        x, *rest = inputs
        return DTensor.from_local(x, mesh, [self.input_layouts]).redistribute(placements=[Replicate()]), *rest

    def _summed(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        y, *logits = outputs if isinstance(outputs, tuple) else (outputs,)
        y = DTensor.from_local(y, mesh, [Partial()]).redistribute(placements=[self.output_layouts]).to_local()
        return (y, *(one.to_local() for one in logits)) if logits else y


def divide(module: nn.Module, experts: MGLUExperts, way: str, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Place the tensors of a layer on the ranks, and tell it the number of the rank's first expert.

    Args:
        module: the module that has `down_proj`.
        experts: the layer, in this module.
        way: a key of DIVISIONS.
        mesh: the ranks, in one dimension.
        src_data_rank: the rank whose values all get; None if each has them already.
    """
    of_experts, of_down_proj = DIVISIONS[way]
    ranks = mesh.size()
    if way == "rows":
        check_rows_of_ranks("intermediate_size", experts.out_features, ranks, experts.weight_format)
        experts.first_expert = 0
    else:
        check_rows_of_ranks("num_experts", experts.num_experts, ranks, "dense")
        experts.first_expert = mesh.get_local_rank() * (experts.num_experts // ranks)
    place(module, "down_proj", of_down_proj, mesh, src_data_rank)
    for name, placement in of_experts.items():
        place(experts, name, placement, mesh, src_data_rank)
