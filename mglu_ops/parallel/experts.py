"""Tensor and expert parallelism of experts: each rank computes the partial sum over its own rows or experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle

from ..formats import get_format
from ..nn.arguments import check_columns_of_ranks, check_rows_of_ranks
from ..nn.experts import ExpertsDown, MGLUExperts, MGLUExpertsFeedForward, OnRank, weighted_sum
from ..routing import SortedRows
from .colwise import place

BY_EXPERTS: dict[str, Placement] = dict.fromkeys(("weight", "weight_scale", "mask_logits", "packed_masks"), Shard(0))
BY_ROWS: dict[str, Placement] = {**dict.fromkeys(BY_EXPERTS, Shard(1)), "mask_logits": Shard(2)}
TOKENS = ("replicated", "sharded")
DIVISIONS = {"experts": (BY_EXPERTS, Shard(0)), "rows": (BY_ROWS, Shard(2))}
"""The placements of `MGLUExperts`' tensors and of `ExpertsDown`'s weight, for each way to divide a layer."""


class ParallelExperts(ParallelStyle):
    """Divide an `MGLUExpertsFeedForward` over ranks, for `parallelize_module`.

        parallelize_module(block, mesh, {"mlp": ParallelExperts("experts")})

    With `"experts"` (expert parallelism), each rank holds some of the experts, with their masks and down projections.
    With `"rows"` (tensor parallelism), each rank holds some rows of every expert's weight and masks, and the same
    columns of its down projection. The routers of experts and of masks are on every rank.

    By default, all ranks have all tokens and the same routing. Each rank computes a partial sum for its experts or
    rows, and the partial sums are added over the ranks. The gradient of x is added over the ranks too. No shape depends
    on the routing, and the host does not wait for a GPU.

    With `tokens="sharded"`, each rank has its own tokens, any number of them, as in data-parallel training. x
    `[..., hidden_size]` and the result are plain tensors. An all-to-all sends one row for each expert of a token to the
    expert's rank, and a second all-to-all returns the results. All ranks must call the layer, also a rank without
    tokens. The number of rows depends on the routing, so **the host waits for its GPU** in each call, and CUDA graphs
    cannot capture the layer. The gradients of the experts are averaged over the ranks. The routers stay ordinary
    parameters: DDP or FSDP averages their gradients, as in the rest of the model.

    Masks may be learned, fixed or frozen, and the layer may be divided before or after `mglu_ops.freeze` and
    `mglu_ops.quantize`. With `"rows"`, each rank must have a multiple of 128 rows of an expert's weight in `fp8_block`,
    and a multiple of 128 columns of a down projection in `fp8_block` or `int4_group`.

    Args:
        divide: `"experts"` or `"rows"`.
        input_layouts: placement of x `[..., hidden_size]`: replicated by default; `Shard(1)` if each rank has a part
            of the sequence of x `[batch, sequence, hidden_size]`, which is then gathered.
        output_layouts: placement of the result: replicated by default; `Shard(1)` scatters the sum along the sequence.
            The logits of `output_router_logits` always contain all tokens.
        tokens: `"replicated"`, or `"sharded"`, which needs `divide="experts"` and takes no layouts.

    Raises:
        ValueError: an argument has another value; or (by `parallelize_module`) the number of ranks does not divide
            num_experts or intermediate_size, or a rank's part would cut blocks or groups of weights that share a scale.
        TypeError: (by `parallelize_module`) the module is not an `MGLUExpertsFeedForward`.
    """

    def __init__(
        self,
        divide: str,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        tokens: str = "replicated",
    ) -> None:
        if divide not in DIVISIONS:
            raise ValueError(f"divide: got {divide!r}, must be 'experts' or 'rows'")
        if tokens not in TOKENS:
            raise ValueError(f"tokens: got {tokens!r}, must be 'replicated' or 'sharded'")
        if tokens == "sharded" and divide != "experts":
            raise ValueError(f"divide: got {divide!r} with tokens='sharded', must be 'experts'")
        if tokens == "sharded" and (input_layouts or output_layouts):
            raise ValueError(
                f"input_layouts, output_layouts: got {input_layouts!r}, {output_layouts!r} with tokens='sharded', "
                "must be None: each rank passes a plain tensor with its own tokens"
            )
        super().__init__()
        self.divide, self.tokens = divide, tokens
        self.input_layouts, self.output_layouts = input_layouts or Replicate(), output_layouts or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MGLUExpertsFeedForward):
            raise TypeError(
                f"module: got {type(module).__name__}, must be an MGLUExpertsFeedForward for ParallelExperts"
            )
        divide(module, module.experts, module.down_proj, self.divide, device_mesh, self.src_data_rank)
        if self.tokens == "sharded":
            module.combine = exchange
            for part in (module, module.experts, module.down_proj):
                part.ranks_of_tokens = device_mesh.size()
            return module
        # `distribute_module` also replicates the parameters of the routers, which are no DTensors yet.
        return distribute_module(module, device_mesh, None, self._gathered, self._summed)

    def _gathered(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        x, *rest = inputs
        return DTensor.from_local(x, mesh, [self.input_layouts]).redistribute(placements=[Replicate()]), *rest

    def _summed(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        y, *logits = outputs if isinstance(outputs, tuple) else (outputs,)
        y = DTensor.from_local(y, mesh, [Partial()]).redistribute(placements=[self.output_layouts]).to_local()
        return (y, *(one.to_local() for one in logits)) if logits else y


def exchange(layer: MGLUExpertsFeedForward, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
    """Compute `weighted_sum` for this rank's own tokens: send a row to each expert of a token, and receive the results.

    Rows are sent sorted by expert, so the receiving rank can tell each row's expert from the number of rows per expert.
    """
    experts = layer.experts
    assert isinstance(experts.weight, DTensor)
    mesh = experts.weight.device_mesh
    group, ranks = mesh.get_group(), mesh.size()
    order = SortedRows(expert_ids, experts.num_experts)
    to_send = order.offs.diff(prepend=order.offs.new_zeros(1))
    to_get = all_to_all_single(to_send, None, None, group)
    counts = torch.stack([to_send, to_get]).view(2, ranks, -1)  # rows sent or received, by other rank and expert
    sent, got = counts.sum(2).tolist()

    rows = all_to_all_single_autograd(order.of_tokens(x), got, sent, group)
    own = experts.num_experts // ranks
    ids = mesh.get_local_rank() * own + torch.arange(experts.num_experts, device=x.device) % own
    ids = ids.repeat_interleave(counts[1].flatten(), output_size=sum(got)).unsqueeze(1)
    results = weighted_sum(layer, rows, ids, expert_weights.new_ones(ids.shape))
    results = all_to_all_single_autograd(results, sent, got, group)
    results = order.put_back(results).unflatten(0, expert_ids.shape)
    return torch.bmm(expert_weights.unsqueeze(1), results).squeeze(1)


def divide(
    block: OnRank,
    experts: MGLUExperts,
    down_proj: ExpertsDown,
    way: str,
    mesh: DeviceMesh,
    src_data_rank: int | None,
) -> None:
    """Divide the tensors of a layer over the ranks of a one-dimensional mesh, and set `first_expert` of its modules.

    `block` is the module that calls `experts` and `down_proj`, and `way` is a key of DIVISIONS. All ranks get the
    values of rank `src_data_rank`; if it is None, each rank has them already.
    """
    placements, down_placement = DIVISIONS[way]
    ranks, first_expert = mesh.size(), 0
    scale_placement: Placement = down_placement
    if way == "rows":
        check_rows_of_ranks("intermediate_size", experts.out_features, ranks, experts.weight_format)
        check_columns_of_ranks("intermediate_size", down_proj.in_features, ranks, down_proj.weight_format)
        if get_format(down_proj.weight_format).columns is None:
            scale_placement = Replicate()
    else:
        check_rows_of_ranks("num_experts", experts.num_experts, ranks, "dense")
        first_expert = mesh.get_local_rank() * (experts.num_experts // ranks)
    block.first_expert = experts.first_expert = down_proj.first_expert = first_expert
    place(down_proj, "weight", down_placement, mesh, src_data_rank)
    place(down_proj, "weight_scale", scale_placement, mesh, src_data_rank)
    for name, placement in placements.items():
        place(experts, name, placement, mesh, src_data_rank)
