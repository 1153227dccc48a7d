"""DTensor's sharding rules: along out_features (column parallel) or along the tokens of x (token parallel).

| sharding | x | weight, scales | packed masks | mask logits | mask weights | result | gradients summed over the ranks |
|---|---|---|---|---|---|---|---|
| replicated | replicated | replicated | replicated | replicated | replicated | replicated | none |
| column parallel | replicated | `Shard(0)` | `Shard(0)` | `Shard(1)` | replicated | `Shard(-1)` | x, mask weights |
| token parallel | `Shard(i)` | replicated | replicated | replicated | `Shard(i)` | `Shard(i)` | weight, mask logits |

No row shards x along in_features, so that each rank has the whole tokens that an `activation_format` rounds. For each
dimension of the mesh, DTensor takes the row that moves the least data. A shard of a weight whose rows share
scales (`fp8_block`) must have whole blocks of them.

The operators over experts have these shardings too, where a weight has a dimension of experts before its rows:

| sharding | operators | x or y, ids, other weights | weight, scales, packed masks | result | gradients summed |
|---|---|---|---|---|---|
| column parallel | all | replicated | `Shard(1)` | `Shard(-1)` | x or y, weights of masks, of experts |
| row parallel | `experts_down` | y `Shard(2)`, others replicated | `Shard(2)` | a sum over the ranks | expert weights |
| token parallel | those with `expert_ids` | `Shard(0)` | replicated | `Shard(0)` | weight |

Logits have the masks before the rows, so that theirs is `Shard(2)` in column parallel. No rule divides a weight along
the experts, because ids and offs count the experts of all ranks: such a weight is gathered.
`mglu_ops.parallel.ParallelExperts` divides it, and gives each rank ids that count its own experts.

Importing this module registers the rules. `ops` imports it when DTensor first asks for the shapes of an operator's
results (`registering.fake`), so that a program without DTensors does not import `torch.distributed.tensor`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from .formats import FORMATS

Option = tuple[list[Placement], list[Placement]]
"""A sharding of an operator: the placements of its results and of its tensor arguments."""

_mglu = torch.ops.mglu
_replicate, _partial = Replicate(), Partial()


def _behind_masks(placement: Placement) -> Placement:
    """Return the placement of the same dimension in a tensor that has a leading dimension of masks."""
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


def _placements(x: Any) -> Iterator[tuple[Placement, Placement, Placement]]:
    """Yield the placements of x, of the rows of the weight, and of the result."""
    last = x.ndim - 1
    yield _replicate, _replicate, _replicate
    yield _replicate, Shard(0), Shard(last)
    for dim in range(last):
        yield Shard(dim), _replicate, Shard(dim)


def _pack(masks: Any) -> list[Option]:
    return [([_replicate], [_replicate]), ([Shard(0)], [Shard(masks.ndim - 2)])]


def _pack_expert_logits(mask_logits: Any) -> list[Option]:
    """Along the experts, or along the rows of each."""
    return [([_replicate], [_replicate]), ([Shard(0)], [Shard(0)]), ([Shard(1)], [Shard(2)])]


def _unpack_masks(packed_masks: Any, in_features: int) -> list[Option]:
    return [([_replicate], [_replicate]), ([Shard(1)], [Shard(0)])]


def _forward(
    x: Any,
    weight: Any,
    packed_masks: Any,
    activation: Any = None,
    mask_weights: Any = None,
    weight_scale: Any = None,
    weight_format: str = "dense",
    activation_format: str = "dense",
) -> list[Option]:
    _check_blocks(weight, weight_format, 0)
    return [
        ([of_result], [of_x, of_rows, of_rows, *_if_given(mask_weights, of_x), *_if_given(weight_scale, of_rows)])
        for of_x, of_rows, of_result in _placements(x)
    ]


def _check_blocks(weight: Any, weight_format: str, dim_of_rows: int) -> None:
    """Check that each shard of a weight has the rows of whole scales."""
    shards = math.prod(
        weight.mesh.size(dim) for dim, placement in enumerate(weight.placements) if placement == Shard(dim_of_rows)
    )
    rows, found = FORMATS[weight_format].rows, weight.shape[dim_of_rows]
    if shards > 1 and rows > 1 and found % (rows * shards):
        raise ValueError(
            f"weight: got {found} rows of {weight_format} in {shards} shards, must be a multiple of {rows} "
            "rows in each shard, which share their scales"
        )


def _forward_ste(
    x: Any, weight: Any, mask_logits: Any, activation: Any = None, mask_weights: Any = None
) -> list[Option]:
    return [
        ([of_result, of_rows], [of_x, of_rows, _behind_masks(of_rows), *_if_given(mask_weights, of_x)])
        for of_x, of_rows, of_result in _placements(x)
    ]


def _forward_train(
    x: Any, weight: Any, packed_masks: Any, activation: Any = None, mask_weights: Any = None
) -> list[Option]:
    return [
        ([of_result, _of_partials(of_result, x)], [of_x, of_rows, of_rows, *_if_given(mask_weights, of_x)])
        for of_x, of_rows, of_result in _placements(x)
    ]


def _of_partials(of_result: Placement, x: Any) -> Placement:
    """Return the placement of the partials, which have one more dimension than the result, the last but one."""
    is_of_columns = isinstance(of_result, Shard) and of_result.dim == x.ndim - 1
    return Shard(x.ndim) if is_of_columns else of_result


def _backward(
    grad_output: Any,
    x: Any,
    weight: Any,
    packed_masks: Any,
    partials: Any,
    needs: Sequence[bool],
    logits_dtype: Any,
    mask_weights_dtype: Any,
) -> list[Option]:
    needed = (*needs, logits_dtype is not None, mask_weights_dtype is not None)
    options = []
    for of_x, of_rows, of_result in _placements(x):
        # Each rank computes the gradient of its own shards, and one term of the gradient of a replicated tensor.
        of_grad_x = _partial if isinstance(of_rows, Shard) else of_x
        of_grad_weight = _partial if isinstance(of_x, Shard) else of_rows
        grads = (of_grad_x, of_grad_weight, _behind_masks(of_grad_weight), of_grad_x)
        # A gradient that is not needed is an empty tensor on every rank.
        results = [grad if is_needed else _replicate for grad, is_needed in zip(grads, needed, strict=True)]
        options.append((results, [of_result, of_x, of_rows, of_rows, _of_partials(of_result, x)]))
    return options


def _if_given(mask_weights: Any, placement: Placement) -> list[Placement]:
    return [] if mask_weights is None else [placement]


# --- Experts --------------------------------------------------------------------------------------------------------


def _of_experts(weight: Any, mask_weights: Any, weight_scale: Any, weight_format: str, of_result: Placement) -> Option:
    """The column-parallel option of a layer of experts, whose fourth argument is `expert_ids` or `offs`."""
    _check_blocks(weight, weight_format, 1)
    of_rows = Shard(1)
    given = [*_if_given(mask_weights, _replicate), *_if_given(weight_scale, of_rows)]
    return [of_result], [_replicate, of_rows, of_rows, _replicate, *given]


def _replicated(arguments: int, results: int = 1) -> Option:
    return [_replicate] * results, [_replicate] * arguments


def _experts_forward(
    x: Any,
    weight: Any,
    packed_masks: Any,
    expert_ids: Any,
    activation: Any = None,
    mask_weights: Any = None,
    weight_scale: Any = None,
    weight_format: str = "dense",
    activation_format: str = "dense",
) -> list[Option]:
    of_tokens = Shard(0)
    given = [*_if_given(mask_weights, of_tokens), *_if_given(weight_scale, _replicate)]
    return [
        _replicated(4 + len(given)),
        _of_experts(weight, mask_weights, weight_scale, weight_format, Shard(2)),
        ([of_tokens], [of_tokens, _replicate, _replicate, of_tokens, *given]),
    ]


def _grouped_forward(
    x: Any,
    weight: Any,
    packed_masks: Any,
    offs: Any,
    activation: Any = None,
    mask_weights: Any = None,
    weight_scale: Any = None,
    weight_format: str = "dense",
    activation_format: str = "dense",
) -> list[Option]:
    option = _of_experts(weight, mask_weights, weight_scale, weight_format, Shard(1))
    return [_replicated(len(option[1])), option]


def _grouped_forward_ste(
    x: Any, weight: Any, mask_logits: Any, offs: Any, activation: Any = None, mask_weights: Any = None
) -> list[Option]:
    of_weights = _if_given(mask_weights, _replicate)
    return [
        _replicated(4 + len(of_weights), 2),
        ([Shard(1), Shard(1)], [_replicate, Shard(1), Shard(2), _replicate, *of_weights]),
    ]


def _grouped_forward_train(
    x: Any, weight: Any, packed_masks: Any, offs: Any, activation: Any = None, mask_weights: Any = None
) -> list[Option]:
    of_weights = _if_given(mask_weights, _replicate)
    return [
        _replicated(4 + len(of_weights), 2),
        ([Shard(1), Shard(2)], [_replicate, Shard(1), Shard(1), _replicate, *of_weights]),
    ]


def _needed(grads: Sequence[Placement], needs: Sequence[bool]) -> list[Placement]:
    """The placements of gradients; one that is not needed is an empty tensor on every rank."""
    return [grad if is_needed else _replicate for grad, is_needed in zip(grads, needs, strict=True)]


def _grouped_backward(
    grad_output: Any,
    x: Any,
    weight: Any,
    packed_masks: Any,
    offs: Any,
    partials: Any,
    needs: Sequence[bool],
    logits_dtype: Any,
    mask_weights_dtype: Any,
) -> list[Option]:
    grads = _needed(
        (_partial, Shard(1), Shard(2), _partial), [*needs, logits_dtype is not None, mask_weights_dtype is not None]
    )
    return [_replicated(6, 4), (grads, [Shard(1), _replicate, Shard(1), Shard(1), _replicate, Shard(2)])]


def _experts_down(
    y: Any, weight: Any, expert_ids: Any, expert_weights: Any, weight_scale: Any = None, weight_format: str = "dense"
) -> list[Option]:
    _check_blocks(weight, weight_format, 1)
    options: list[Option] = [
        _replicated(4 + len(_if_given(weight_scale, _replicate))),
        ([Shard(1)], [_replicate, Shard(1), _replicate, _replicate, *_if_given(weight_scale, Shard(1))]),
        ([Shard(0)], [Shard(0), _replicate, Shard(0), Shard(0), *_if_given(weight_scale, _replicate)]),
    ]
    if weight_scale is None:  # a stored weight's columns may share scales or bytes
        options.append(([_partial], [Shard(2), Shard(2), _replicate, _replicate]))
    return options


def _experts_down_backward(
    grad_output: Any, y: Any, weight: Any, expert_ids: Any, expert_weights: Any, needs: Sequence[bool]
) -> list[Option]:
    return [
        _replicated(5, 3),
        (_needed([_partial, Shard(1), _partial], needs), [Shard(1), _replicate, Shard(1), _replicate, _replicate]),
        (_needed([Shard(0), _partial, Shard(0)], needs), [Shard(0), Shard(0), _replicate, Shard(0), Shard(0)]),
        (_needed([Shard(2), Shard(2), _partial], needs), [_replicate, Shard(2), Shard(2), _replicate, _replicate]),
    ]


def _register(op: Any, rule: Callable[..., list[Option]], first_option: int | None = None) -> None:
    """Register a rule, unless the user has registered one.

    `first_option` is the position of the first argument other than a tensor on which the rule or a result's shape
    depends.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    if op in propagator.op_strategy_funcs:
        return
    register_sharding(op)(rule)
    if first_option is not None:
        # DTensor caches a rule's result by the placements of the tensors and by the arguments from `first_option` on.
        # `register_sharding` assumes the position of the first integer argument, and would ignore `needs` of backward.
        propagator.op_to_schema_info[op] = RuntimeSchemaInfo(first_option, needs_pytree=True)


def _position(op: Any, name: str) -> int:
    return [argument.name for argument in op._schema.arguments].index(name)


_register(_mglu.pack_masks.default, _pack)
_register(_mglu.pack_logits.default, _pack)
_register(_mglu.pack_expert_logits.default, _pack_expert_logits)
_register(_mglu.unpack_masks.default, _unpack_masks)
_register(_mglu.forward.default, _forward, _position(_mglu.forward.default, "weight_format"))
_register(_mglu.forward_ste.default, _forward_ste)
_register(_mglu.forward_train.default, _forward_train)
_register(_mglu.backward.default, _backward, _position(_mglu.backward.default, "needs"))
_register(_mglu.grouped_forward_ste.default, _grouped_forward_ste)
_register(_mglu.grouped_forward_train.default, _grouped_forward_train)
_RULES: dict[Any, tuple[Callable[..., list[Option]], str]] = {
    _mglu.experts_forward.default: (_experts_forward, "weight_format"),
    _mglu.grouped_forward.default: (_grouped_forward, "weight_format"),
    _mglu.experts_down.default: (_experts_down, "weight_format"),
    _mglu.grouped_backward.default: (_grouped_backward, "needs"),
    _mglu.experts_down_backward.default: (_experts_down_backward, "needs"),
}
for _op, (_rule, _first_option) in _RULES.items():
    _register(_op, _rule, _position(_op, _first_option))
