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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from .formats import FORMATS
from .given import OPERATORS, Given
from .registering import names_of

Option = tuple[list[Placement], list[Placement]]
"""A sharding of an operator: the placements of its results and of its tensor arguments."""

_replicate, _partial = Replicate(), Partial()
_WEIGHTS = ("weight", "packed_masks", "weight_scale", "mask_logits")
_ROWS_OF_TOKENS = ("x", "y", "mask_weights", "expert_ids", "expert_weights", "result", "grad_output", "partials")


class Sharding(NamedTuple):
    """A row of the tables above. Tensors that are not listed are replicated.

    Attributes:
        placements: of the arguments, and of `result` and `partials`.
        gradients: the placements of the gradients of the arguments. `_partial`: each rank has one term.
    """

    placements: Mapping[str, Placement]
    gradients: Mapping[str, Placement]


_REPLICATED = Sharding({}, {})
_ROWS_OF_DOWN = {"y": Shard(2), "weight": Shard(2)}
_ROW_PARALLEL = Sharding({**_ROWS_OF_DOWN, "result": _partial}, {**_ROWS_OF_DOWN, "expert_weights": _partial})


def _column_parallel(rows: int, last: int) -> Sharding:
    """Shard out_features, which are dimension `rows` of the weight and dimension `last` of the result."""
    weights = dict.fromkeys(_WEIGHTS, Shard(rows)) | {"mask_logits": Shard(rows + 1)}
    results = {"result": Shard(last), "grad_output": Shard(last), "partials": Shard(last + 1)}
    return Sharding(
        {**weights, **results}, {**weights, **dict.fromkeys(("x", "y", "mask_weights", "expert_weights"), _partial)}
    )


def _token_parallel(dim: int) -> Sharding:
    """Shard a dimension of tokens."""
    tokens = dict.fromkeys(_ROWS_OF_TOKENS, Shard(dim))
    return Sharding(tokens, {**tokens, **dict.fromkeys(_WEIGHTS, _partial)})


def _shardings(given: Mapping[str, Any]) -> Iterator[Sharding]:
    """Yield the shardings of an operator with these arguments."""
    yield _REPLICATED
    if "offs" in given:
        yield _column_parallel(1, 1)
    elif "expert_ids" in given:
        yield _column_parallel(1, 1 if "y" in given else 2)
        yield _token_parallel(0)
        # Columns of a stored weight may share scales or bytes, so they are not divided.
        if "y" in given and given.get("weight_scale") is None:
            yield _ROW_PARALLEL
    else:
        last = given["x"].ndim - 1
        yield _column_parallel(0, last)
        yield from map(_token_parallel, range(last))


_RESULTS = {"ste": ("result", "packed_masks"), "train": ("result", "partials")}
"""The results of an operator, by its kind in `OPERATORS`. Operators of other kinds return `result` or gradients."""


def _options(op: Any, kind: str, *args: Any, **kwargs: Any) -> list[Option]:
    """Return the shardings of a call in the form of `register_sharding`."""
    names = names_of(op)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    _check_blocks(given["weight"], given.get("weight_format", "dense"))
    tensors = [name for name in names if isinstance(given.get(name), DTensorSpec)]
    options = []
    for placements, gradients in _shardings(given):
        results = [placements.get(name, _replicate) for name in _RESULTS.get(kind, ("result",))]
        if "needs" in given:
            results = [
                # A gradient that is not needed is an empty tensor on every rank.
                gradients.get(name, _replicate) if is_needed else _replicate
                for name, is_needed in _gradients_of(given).items()
            ]
        options.append((results, [placements.get(name, _replicate) for name in tensors]))
    return options


def _gradients_of(given: Mapping[str, Any]) -> dict[str, bool]:
    """Return the arguments whose gradients an operator returns, in order, and whether each gradient is needed."""
    if "y" in given:
        return dict(zip(("y", "weight", "expert_weights"), given["needs"], strict=True))
    dtypes = given["logits_dtype"], given["mask_weights_dtype"]
    needs = *given["needs"], *(dtype is not None for dtype in dtypes)
    return dict(zip(("x", "weight", "mask_logits", "mask_weights"), needs, strict=True))


def _check_blocks(weight: Any, weight_format: str) -> None:
    """Check that no two shards of a weight have rows that share a scale."""
    dim_of_rows = weight.ndim - 2
    shards = math.prod(
        weight.mesh.size(dim) for dim, placement in enumerate(weight.placements) if placement == Shard(dim_of_rows)
    )
    rows, found = FORMATS[weight_format].rows, weight.shape[dim_of_rows]
    if shards > 1 and rows > 1 and found % (rows * shards):
        raise ValueError(
            f"weight: got {found} rows of {weight_format} in {shards} shards, must be a multiple of {rows} "
            "rows in each shard, which share their scales"
        )


def _pack(masks: Any) -> list[Option]:
    return [([_replicate], [_replicate]), ([Shard(0)], [Shard(masks.ndim - 2)])]


def _pack_expert_logits(mask_logits: Any) -> list[Option]:
    """Shard the experts, or the rows of each expert."""
    return [([_replicate], [_replicate]), ([Shard(0)], [Shard(0)]), ([Shard(1)], [Shard(2)])]


def _unpack_masks(packed_masks: Any, in_features: int) -> list[Option]:
    return [([_replicate], [_replicate]), ([Shard(1)], [Shard(0)])]


def on_local_tensors(run: Callable[[Given], Tensor], given: Given) -> Tensor:
    """Run a differentiable function of the arguments of `mglu::experts_forward` on the local parts of DTensors.

    For each dimension of the mesh, the call is column parallel if the rows of the weight are sharded along it, else
    token parallel if the tokens of x are sharded along it, and otherwise replicated.
    """
    tensors = given.tensors()
    mesh = next(tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor))
    shardings = [_present_sharding(given, dim) for dim in range(mesh.ndim)]
    if isinstance(given.weight, DTensor):
        _check_blocks(given.weight._spec, given.weight_format)

    def placements(name: str) -> list[Placement]:
        return [one.placements.get(name, _replicate) for one in shardings]

    local: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            if list(tensor.placements) != placements(name):
                tensor = tensor.redistribute(placements=placements(name))
            gradients = [one.gradients.get(name, _replicate) for one in shardings]
            local[name] = tensor.to_local(grad_placements=gradients)
    result = run(given._replace(**local))
    # Give the shape, because ranks may hold different numbers of tokens or columns.
    shape = torch.Size((*given.leading, given.out_features))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(result, mesh, placements("result"), run_check=False, shape=shape, stride=stride)


def _present_sharding(given: Given, dim: int) -> Sharding:
    """Return how a dimension of the mesh divides a call of `mglu::experts_forward`."""
    if isinstance(given.weight, DTensor) and given.weight.placements[dim] == Shard(1):
        return _column_parallel(1, 2)
    if isinstance(given.x, DTensor) and given.x.placements[dim] == Shard(0):
        return _token_parallel(0)
    return _REPLICATED


def _register(name: str, rule: Callable[..., list[Option]]) -> None:
    """Register the rule of an operator, unless the user has registered one."""
    op = getattr(torch.ops.mglu, name).default
    propagator = DTensor._op_dispatcher.sharding_propagator
    if op in propagator.op_strategy_funcs:
        return
    register_sharding(op)(rule)
    for position, argument in enumerate(names_of(op)):
        if argument in ("weight_format", "needs"):
            # DTensor caches a rule's result by the placements of the tensors and by the arguments from this position
            # on. `register_sharding` assumes that the first integer argument is the first on which the result depends,
            # and so would ignore `needs` of backward.
            propagator.op_to_schema_info[op] = RuntimeSchemaInfo(position, needs_pytree=True)


_register("pack_masks", _pack)
_register("pack_logits", _pack)
_register("pack_expert_logits", _pack_expert_logits)
_register("unpack_masks", _unpack_masks)
for _name, (_kind, _) in {**OPERATORS, "experts_down_backward": ("backward", None)}.items():
    _register(_name, partial(_options, getattr(torch.ops.mglu, _name).default, _kind))
