"""DTensor's sharding rules: out_features are sharded (column parallel), or the tokens of x (token parallel).

| sharding | x | weight, scales | packed masks | mask logits | mask weights | result | gradients summed over the ranks |
|---|---|---|---|---|---|---|---|
| replicated | replicated | replicated | replicated | replicated | replicated | replicated | none |
| column parallel | replicated | `Shard(0)` | `Shard(0)` | `Shard(1)` | replicated | `Shard(-1)` | x, mask weights |
| token parallel | `Shard(i)` | replicated | replicated | replicated | `Shard(i)` | `Shard(i)` | weight, mask logits |

No sharding divides x along in_features, because an `activation_format` rounds whole tokens. For each dimension of the
mesh, DTensor takes the sharding that moves the least data. If rows of the weight share scales (`fp8_block`), each shard
must have whole blocks of such rows.

The operators over experts have these shardings; their weights have a dimension of experts before the rows:

| sharding | operators | x or y, ids, other weights | weight, scales, packed masks | result | gradients summed |
|---|---|---|---|---|---|
| column parallel | all | replicated | `Shard(1)` | `Shard(-1)` | x or y, mask weights or expert weights |
| row parallel | `experts_down` | y `Shard(2)`, others replicated | `Shard(2)` | a sum over the ranks | expert weights |
| token parallel | those with `expert_ids` | `Shard(0)` | replicated | `Shard(0)` | weight |

The mask logits have a dimension of masks before the rows, so they are `Shard(2)` in column parallel. No rule divides a
weight along the experts, because ids and offs number the experts of all ranks: DTensor gathers such a weight.
`mglu_ops.parallel.ParallelExperts` divides it, and gives each rank ids that number its own experts.

Importing this module registers the rules. `registering.fake` imports it when DTensor first asks for the shapes of an
operator's results, so a program without DTensors does not import `torch.distributed.tensor`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from .formats import FORMATS
from .given import Given

Option = tuple[list[Placement], list[Placement]]
"""A sharding of an operator: the placements of its results and of its tensor arguments."""

_mglu = torch.ops.mglu
_replicate, _partial = Replicate(), Partial()


def _behind_masks(placement: Placement) -> Placement:
    """Convert a placement of a weight to a placement of its mask logits, which have a dimension of masks in front."""
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


def _placements(x: Any) -> Iterator[tuple[Placement, Placement, Placement]]:
    """Yield the placements of x, of the rows of the weight, and of the result, for each sharding of a layer."""
    last = x.ndim - 1
    yield _replicate, _replicate, _replicate
    yield _replicate, Shard(0), Shard(last)
    for dim in range(last):
        yield Shard(dim), _replicate, Shard(dim)


def _pack(masks: Any) -> list[Option]:
    return [([_replicate], [_replicate]), ([Shard(0)], [Shard(masks.ndim - 2)])]


def _pack_expert_logits(mask_logits: Any) -> list[Option]:
    """Shard the experts, or the rows of each expert."""
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
        (
            [y_placement],
            [
                x_placement,
                rows_placement,
                rows_placement,
                *_if_given(mask_weights, x_placement),
                *_if_given(weight_scale, rows_placement),
            ],
        )
        for x_placement, rows_placement, y_placement in _placements(x)
    ]


def _check_blocks(weight: Any, weight_format: str, dim_of_rows: int) -> None:
    """Check that no two shards of a weight have rows that share a scale."""
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
        (
            [y_placement, rows_placement],
            [x_placement, rows_placement, _behind_masks(rows_placement), *_if_given(mask_weights, x_placement)],
        )
        for x_placement, rows_placement, y_placement in _placements(x)
    ]


def _forward_train(
    x: Any, weight: Any, packed_masks: Any, activation: Any = None, mask_weights: Any = None
) -> list[Option]:
    return [
        (
            [y_placement, _partials_placement(y_placement, x)],
            [x_placement, rows_placement, rows_placement, *_if_given(mask_weights, x_placement)],
        )
        for x_placement, rows_placement, y_placement in _placements(x)
    ]


def _partials_placement(y_placement: Placement, x: Any) -> Placement:
    """Return the placement of the partials. They have one more dimension than the result, before the last."""
    is_column_parallel = isinstance(y_placement, Shard) and y_placement.dim == x.ndim - 1
    return Shard(x.ndim) if is_column_parallel else y_placement


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
    for x_placement, rows_placement, y_placement in _placements(x):
        # A rank computes the gradients of its shards, and one term of the gradient of a replicated tensor.
        grad_x = _partial if isinstance(rows_placement, Shard) else x_placement
        grad_weight = _partial if isinstance(x_placement, Shard) else rows_placement
        grads = (grad_x, grad_weight, _behind_masks(grad_weight), grad_x)
        # A gradient that is not needed is an empty tensor on every rank.
        results = [grad if is_needed else _replicate for grad, is_needed in zip(grads, needed, strict=True)]
        options.append(
            (results, [y_placement, x_placement, rows_placement, rows_placement, _partials_placement(y_placement, x)])
        )
    return options


def _if_given(mask_weights: Any, placement: Placement) -> list[Placement]:
    return [] if mask_weights is None else [placement]


# --- Experts --------------------------------------------------------------------------------------------------------


def _column_parallel_experts(
    weight: Any, mask_weights: Any, weight_scale: Any, weight_format: str, y_placement: Placement
) -> Option:
    """Return the column-parallel option of a layer of experts, whose fourth argument is `expert_ids` or `offs`."""
    _check_blocks(weight, weight_format, 1)
    rows_placement = Shard(1)
    given = [*_if_given(mask_weights, _replicate), *_if_given(weight_scale, rows_placement)]
    return [y_placement], [_replicate, rows_placement, rows_placement, _replicate, *given]


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
    tokens_placement = Shard(0)
    given = [*_if_given(mask_weights, tokens_placement), *_if_given(weight_scale, _replicate)]
    return [
        _replicated(4 + len(given)),
        _column_parallel_experts(weight, mask_weights, weight_scale, weight_format, Shard(2)),
        ([tokens_placement], [tokens_placement, _replicate, _replicate, tokens_placement, *given]),
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
    option = _column_parallel_experts(weight, mask_weights, weight_scale, weight_format, Shard(1))
    return [_replicated(len(option[1])), option]


def _grouped_forward_ste(
    x: Any, weight: Any, mask_logits: Any, offs: Any, activation: Any = None, mask_weights: Any = None
) -> list[Option]:
    mask_weights_placement = _if_given(mask_weights, _replicate)
    return [
        _replicated(4 + len(mask_weights_placement), 2),
        ([Shard(1), Shard(1)], [_replicate, Shard(1), Shard(2), _replicate, *mask_weights_placement]),
    ]


def _grouped_forward_train(
    x: Any, weight: Any, packed_masks: Any, offs: Any, activation: Any = None, mask_weights: Any = None
) -> list[Option]:
    mask_weights_placement = _if_given(mask_weights, _replicate)
    return [
        _replicated(4 + len(mask_weights_placement), 2),
        ([Shard(1), Shard(2)], [_replicate, Shard(1), Shard(1), _replicate, *mask_weights_placement]),
    ]


def _needed(grads: Sequence[Placement], needs: Sequence[bool]) -> list[Placement]:
    """Return the placements of gradients. A gradient that is not needed is an empty tensor on every rank."""
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
    if weight_scale is None:  # columns of a stored weight may share scales or bytes, so they are not divided
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


def on_local_tensors(run: Callable[[Given], Tensor], given: Given) -> Tensor:
    """Run a differentiable function of the arguments of `mglu::experts_forward` on the local parts of DTensors.

    For each dimension of the mesh, the call is column parallel if the rows of the weight are sharded along it, else
    token parallel if the tokens of x are sharded along it, and otherwise replicated.
    """
    tensors = given.tensors()
    mesh = next(tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor))
    ways = [_way(given, dim) for dim in range(mesh.ndim)]
    if isinstance(given.weight, DTensor):
        _check_blocks(given.weight._spec, given.weight_format, 1)

    def placed(name: str, table: dict[str, dict[str, Placement]]) -> list[Placement]:
        return [table[way].get(name, _replicate) for way in ways]

    local: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            if list(tensor.placements) != placed(name, _PLACEMENTS):
                tensor = tensor.redistribute(placements=placed(name, _PLACEMENTS))
            local[name] = tensor.to_local(grad_placements=placed(name, _GRADIENTS))
    result = run(given._replace(**local))
    # Give the shape, because ranks may hold different numbers of tokens or columns.
    shape = torch.Size((*given.leading, given.out_features))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(result, mesh, placed("result", _PLACEMENTS), run_check=False, shape=shape, stride=stride)


def _way(given: Given, dim: int) -> str:
    """Return how a dimension of the mesh divides a call of `mglu::experts_forward`, as a key of `_PLACEMENTS`."""
    for name, tensor, wanted in (("columns", given.weight, Shard(1)), ("tokens", given.x, Shard(0))):
        if isinstance(tensor, DTensor) and tensor.placements[dim] == wanted:
            return name
    return "replicated"


_WEIGHTS, _ROWS_OF_TOKENS = ("weight", "packed_masks", "weight_scale"), ("x", "mask_weights", "expert_ids", "result")
_PLACEMENTS: dict[str, dict[str, Placement]] = {
    "columns": {**dict.fromkeys(_WEIGHTS, Shard(1)), "result": Shard(2)},
    "tokens": dict.fromkeys(_ROWS_OF_TOKENS, Shard(0)),
    "replicated": {},
}
"""The placements of the tensors and of the result, by the value of `_way`. Tensors not listed are replicated."""
_GRADIENTS: dict[str, dict[str, Placement]] = {
    "columns": {**_PLACEMENTS["columns"], "x": _partial, "mask_weights": _partial},
    "tokens": {**_PLACEMENTS["tokens"], **dict.fromkeys(_WEIGHTS, _partial)},
    "replicated": {},
}
"""The placements of the gradients, by the value of `_way`. `_partial`: each rank has one term of the gradient."""


def _register(op: Any, rule: Callable[..., list[Option]], first_option: int | None = None) -> None:
    """Register a rule, unless the user has registered one.

    `first_option` is the position of the first non-tensor argument on which the placements or shapes of the results
    depend.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    if op in propagator.op_strategy_funcs:
        return
    register_sharding(op)(rule)
    if first_option is not None:
        # DTensor caches a rule's result by the placements of the tensors and by the arguments from `first_option` on.
        # `register_sharding` assumes that the first integer argument is the first such argument, and so would ignore
        # `needs` of backward.
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
