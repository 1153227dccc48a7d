"""The tensor-parallel style "mglu_colwise" of Transformers. Import this module only where transformers is installed."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, ColwiseParallel

from ..nn.arguments import check_rows_of_ranks
from ..nn.masked_linear import MaskedLinear
from .colwise import ROWS, place

NAME = "mglu_colwise"


class TransformersColwiseMGLU(ColwiseParallel):
    """`mglu_ops.parallel.ColwiseMGLU` for the `tp_plan` of a Transformers model.

    Transformers shards the parameters of the module one by one, before it loads a checkpoint. It leaves buffers and the
    router's parameters alone; `install_forward` places these, so that the loader finds DTensors and reads the rows of
    this rank.
    """

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Place a parameter of the module."""
        place(module, param, ROWS[param], mesh, None)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Place the packed masks and the router, and let the module run on DTensors."""
        if not isinstance(module, MaskedLinear) or module.num_experts is not None:
            raise TypeError(
                f'tp_plan: got the style "{NAME}" for a {type(module).__name__}, must be for an MGLU or a NaiveMGLU'
            )
        check_rows_of_ranks("out_features", module.out_features, mesh.size(), module.weight_format)
        place(module, "packed_masks", ROWS["packed_masks"], mesh, None)
        if module.router is not None:
            for name, _ in list(module.router.named_parameters(recurse=False)):
                place(module.router, name, Replicate(), mesh, None)
        return super().install_forward(module, mesh)


def register() -> None:
    """Register the style; a second call does no harm."""
    ALL_PARALLEL_STYLES.register(NAME, TransformersColwiseMGLU())
