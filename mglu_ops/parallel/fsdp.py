"""Divides mask logits over the ranks of FSDP2."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.tensor import Shard

from ..nn.arguments import check_model
from ..nn.mask_logits import Selection, logits_of_modules, parameters_with_owners, selected


def shard_placement_fn(model: nn.Module, *, mask_logits: Selection = ()) -> Callable[[nn.Parameter], Shard | None]:
    """Return a `shard_placement_fn` for `fully_shard`, which divides each mask over all ranks.

        placement = shard_placement_fn(model)
        for block in model.blocks:
            fully_shard(block, shard_placement_fn=placement)
        fully_shard(model, shard_placement_fn=placement)

    `fully_shard` divides every parameter along its first dimension. For logits `[n_masks, out_features, in_features]`,
    this is the dimension of masks: with one mask, the first rank holds all logits and their optimizer state. With this
    function, logits are divided along out_features, like the weight. The logits of experts,
    `[num_experts, n_masks, out_features, in_features]`, are divided along the experts, like their weight.

    FSDP divides dimensions other than the first only into equal parts. If the number of ranks does not divide
    out_features, FSDP raises an error that names the sizes.

    Args:
        model: the model. The logits of `MGLU` and `NaiveMGLU` are found by the class of their module.
        mask_logits: more parameters that are logits, as in `mglu_ops.nn.parameter_groups`.

    Returns:
        A function that maps a parameter to the `Shard` of out_features if it holds logits of a layer without experts,
        and to None otherwise.

    Raises:
        TypeError: `model` is not an `nn.Module`, or `mask_logits` has another type.
        ValueError: a name in `mask_logits` matches no parameter.
    """
    check_model(model)
    names = set(selected(model, mask_logits))

    def placement(parameter: nn.Parameter) -> Shard | None:
        # Look up the logits at each call, since `fully_shard` replaces the parameters of one module after the other.
        logits = {other for name, _, other in parameters_with_owners(model) if name in names}
        logits.update(logits_of_modules(model))
        return Shard(parameter.dim() - 2) if parameter in logits and parameter.dim() < 4 else None

    return placement
