"""Tensor-parallel styles of Transformers for MGLU layers. Importing this module requires transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, ColwiseParallel, TensorParallelLayer

from ..nn.arguments import check_rows_of_ranks
from ..nn.masked_linear import MaskedLinear
from .colwise import ROWS, place
from .experts import divide

NAME = "mglu_colwise"


class TransformersColwiseMGLU(ColwiseParallel):
    """`mglu_ops.parallel.ColwiseMGLU` for the `tp_plan` of a Transformers model.

    Before it loads a checkpoint, Transformers shards the parameters of the module one by one. It shards neither buffers
    nor the router's parameters, so `install_forward` makes them DTensors. The loader reads this rank's part of every
    DTensor.
    """

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Shard a parameter of the module."""
        place(module, param, ROWS[param], mesh, None)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Shard the packed masks, replicate the router, and make the module run on DTensors."""
        if not isinstance(module, MaskedLinear) or module.num_experts is not None:
            raise TypeError(
                f'tp_plan: got the style "{NAME}" for a {type(module).__name__}, must be for an MGLU or a NaiveMGLU'
            )
        check_rows_of_ranks("out_features", module.out_features, mesh.size(), module.weight_format)
        place(module, "packed_masks", ROWS["packed_masks"], mesh, None)
        _replicate_router(module, mesh)
        return super().install_forward(module, mesh)


class TransformersParallelExperts(TensorParallelLayer):
    """`mglu_ops.parallel.ParallelExperts` for the experts of a Transformers model.

    On every rank, `expert_ids` number the experts of all ranks, from 0 to num_experts - 1.

    Args:
        way: `"rows"` or `"experts"`, as the argument `divide` of `ParallelExperts`.
    """

    def __init__(self, way: str) -> None:
        self.way = way

    def install_forward(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        """Divide all tensors of the experts, so that the loader reads this rank's part, and install the hooks below."""
        experts: Any = module.mglu
        down_proj: Any = module.down_proj
        divide(module, experts, down_proj, self.way, mesh, None)
        _replicate_router(experts, mesh)
        return super().install_forward(module, mesh)

    def transform_inputs_pre_forward(
        self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Turn x and the expert weights into DTensors, so that their gradients are summed over the ranks."""
        x, expert_ids, weights = args
        x, weights = (DTensor.from_local(tensor, mesh, [Replicate()], run_check=False) for tensor in (x, weights))
        return (x, expert_ids, weights), kwargs

    def transform_output_post_forward(self, module: nn.Module, output: Tensor, mesh: DeviceMesh) -> Tensor:
        """Sum the results over the ranks."""
        return DTensor.from_local(output, mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()


def _replicate_router(layer: MaskedLinear, mesh: DeviceMesh) -> None:
    if layer.router is not None:
        for name, _ in list(layer.router.named_parameters(recurse=False)):
            place(layer.router, name, Replicate(), mesh, None)


def register() -> None:
    """Register the styles. The function may be called again."""
    ALL_PARALLEL_STYLES.register(NAME, TransformersColwiseMGLU())
    ALL_PARALLEL_STYLES.register("mglu_expert_rows", TransformersParallelExperts("rows"))
    ALL_PARALLEL_STYLES.register("mglu_experts", TransformersParallelExperts("experts"))
