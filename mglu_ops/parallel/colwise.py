"""Tensor parallelism: each rank computes some of the out_features, from its rows of the weight and of the masks."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel

from ..nn.arguments import check_rows_of_ranks
from ..nn.masked_linear import MaskedLinear

ROWS = {"weight": Shard(0), "weight_scale": Shard(0), "mask_logits": Shard(1), "packed_masks": Shard(0)}
"""The placement of each tensor of a layer that is divided along out_features, the rows of the weight and the masks."""


class ColwiseMGLU(ColwiseParallel):
    """Shard an `MGLU` or a `NaiveMGLU` along out_features, for `parallelize_module`.

        parallelize_module(block, mesh, {"mglu": ColwiseMGLU(), "down_proj": RowwiseParallel()})

    Each rank holds its rows of `weight` `[out_features, in_features]`, and of `mask_logits`
    `[n_masks, out_features, in_features]` or `packed_masks` `[out_features, ceil(in_features / 8), n_masks]`. A router
    is on every rank. The forward pass needs no communication, and the backward pass sums the gradient of x over the
    ranks. The linear layer that follows sums its result over the ranks (`RowwiseParallel`). Masks may be learned, fixed
    or frozen, and the layer may be sharded before or after `mglu_ops.freeze` and `mglu_ops.quantize`. In `fp8_block` a
    rank's number of rows must be a multiple of 128.

    Args:
        input_layouts: placement of x `[..., in_features]`: replicated by default; `Shard(1)` if each rank has a part
            of the sequence of x `[batch, sequence, in_features]`, which is then gathered.
        output_layouts: placement of the result `[..., out_features]`; by default `Shard(-1)`, some of the out_features
            on each rank.
        use_local_output: return the local part as a plain tensor, and not a DTensor.

    Raises:
        TypeError: (by `parallelize_module`) the module is neither an `MGLU` nor a `NaiveMGLU`.
        ValueError: (by `parallelize_module`) a rank's rows would cut blocks of `fp8_block`; or the number of ranks does
            not divide out_features, and the result is local and sharded. The next module could not tell the whole size
            of such a result. `use_local_output=False` takes any out_features.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MaskedLinear) or module.num_experts is not None:
            raise TypeError(f"module: got {type(module).__name__}, must be an MGLU or a NaiveMGLU for ColwiseMGLU")
        if self.use_local_output and not self.output_layouts[0].is_replicate():
            check_rows_of_ranks("out_features", module.out_features, device_mesh.size(), module.weight_format)
        return distribute_module(
            module,
            device_mesh,
            partial(_partition, self.src_data_rank),
            partial(self._prepare_input_fn, self.input_layouts, self.desired_input_layouts),
            partial(self._prepare_output_fn, self.output_layouts, self.use_local_output),
        )


def _partition(src_data_rank: int | None, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the tensors of the layer. Afterwards `distribute_module` replicates the parameters of its router."""
    if isinstance(module, MaskedLinear):
        for tensor_name, placement in ROWS.items():
            place(module, tensor_name, placement, mesh, src_data_rank)


def place(module: nn.Module, name: str, placement: Placement, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Replace a parameter or a buffer by a DTensor on a one-dimensional mesh. Leave DTensors and None unchanged.

    All ranks get the values of rank `src_data_rank`. If it is None, each rank must have the values already.
    """
    tensor: Tensor | None = getattr(module, name)
    if tensor is None or isinstance(tensor, DTensor):
        return
    placed = distribute_tensor(tensor.detach(), mesh, [placement], src_data_rank=src_data_rank)
    is_parameter = isinstance(tensor, nn.Parameter)
    setattr(module, name, nn.Parameter(placed, requires_grad=tensor.requires_grad) if is_parameter else placed)
