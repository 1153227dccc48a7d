"""The plans of libmglu_ops.so, which is compiled once and runs calls of any number of rows.

Python chooses a launch for some numbers of rows. It computes the plan of this launch with a `Size`, a recorded
expression, for each integer that depends on the call or on the GPU. C++ evaluates these expressions in each call, from
the values that `VARIABLES` lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from ...call import Call, Layout, StoredWeight
from ...sizes import Size, least, text
from .choice import choose, choose_experts
from .device import Gpu
from .kernels import experts, experts_down, group_tokens, plain, quantize_x
from .kernels.plain import Plain
from .launch import Plan, Step

VARIABLES = (
    *("rows", "multiprocessors", "shared_bytes_per_sm", "out_features", "in_features"),
    *("x_row_stride", "x_column_stride", "x_is_vectorizable", "weight_row_stride", "weight_column_stride"),
    *("mask_row_stride", "mask_octet_stride", "mask_stride", "mask_weight_row_stride", "mask_weight_column_stride"),
    *("id_bytes", "experts", "top_k", "expert_weight_bytes", "expert_mask_bytes", "expert_scale_bytes"),
    *("element", "element_bytes", "weight_format", "n_masks", "activation", "mask_weights"),
)
"""The values of a call and of a GPU on which plans may depend, as csrc/library/cuda/plan.h declares them. `rows` are
the rows of x, or for `experts_down` the tokens. Strides count elements, `expert_..._bytes` are the bytes from one
expert to the next, and `element`, `weight_format`, `activation` and `mask_weights` are codes of csrc/cuda."""

MOST_EXPERTS, MOST_EXPERT_ROWS = group_tokens.MOST_EXPERTS, group_tokens.MOST_ROWS
"""The most experts of a call, and the most rows of its result."""

_MOST_ROWS = plain.MOST_TOKENS // 512 * 512
"""The most rows of a launch without experts. C++ divides a larger call, and with a multiple of 512 rows all of its
launches begin at addresses as aligned as the first one's."""

_EACH_COUNT = 512
"""Up to this many rows, a launch is chosen for every number of rows. Above that, numbers between two powers of two take
the launch of the larger one."""


@dataclass(frozen=True)
class LayerPlan:
    """A plan, and the range of numbers of rows for which it is used."""

    first_rows: int
    last_rows: int
    plan: Plan


def layer_plans(call_of: Callable[[int], Call], gpu: Gpu) -> Iterator[LayerPlan]:
    """Yield the plans of a layer, in ascending order of their numbers of rows.

    Args:
        call_of: returns the call for a number of rows of x, or of tokens for `experts_down`. All tensors are contiguous
            and aligned to 16 bytes.
        gpu: the GPU for which launches are chosen. The plans run on all GPUs of its architecture.

    Raises:
        ValueError: no kernel takes a call of `experts_down` with one token.
    """
    first, known = 1, None
    for rows in _row_counts(call_of(1)):
        launch = _launch(call_of(rows), gpu)
        if launch is None:
            break
        plan = _plan(launch, call_of, rows, gpu)
        if first != rows:
            same = _plan(launch, call_of, first, gpu)
            assert described(plan) == described(same), f"a plan for {rows} rows is not one for {first} rows: {plan}"
        if known is not None and described(known.plan) == described(plan):
            known = replace(known, last_rows=rows)
        else:
            if known is not None:
                yield known
            known = LayerPlan(first, rows, plan)
        first = rows + 1
    if known is not None:
        yield known


def described(plan: Plan) -> tuple[object, ...]:
    """Return a plan with the text of each `Size` in place of its value. Plans with equal texts agree in every call."""

    def texts(value: object) -> object:
        if isinstance(value, dict):
            return {key: texts(one) for key, one in value.items()}
        if isinstance(value, tuple):
            return tuple(map(texts, value))
        if hasattr(value, "__dataclass_fields__"):
            return texts(vars(value))
        return text(value) if isinstance(value, int) else value

    return tuple(map(texts, plan))


def _row_counts(call: Call) -> list[int]:
    """Return the numbers of rows for which launches are chosen, up to the most rows of a launch."""
    if call.routing is None:
        most = _MOST_ROWS
    else:
        most = (group_tokens.MOST_ROWS if call.n_masks else experts_down.MOST_ROWS) // (call.routing.top_k or 1)
    powers = {1 << bits for bits in range(most.bit_length())}
    return sorted(rows for rows in {*range(1, _EACH_COUNT + 1), *powers, most} if rows <= most)


def _launch(call: Call, gpu: Gpu) -> Callable[[Call, Gpu], Plan] | None:
    """Return the function that plans the chosen launch of a call; None if shared memory cannot hold the sorted rows.

    For many rows per expert, Python multiplies by `grouped_mm` (`experts_down.uses_library`). C++ never does.
    """
    if call.routing is None:
        return partial(quantize_x.plan, choose(call, gpu).config)
    if call.n_masks:
        return choose_experts(call, gpu).plan
    if call.tokens == call.routing.top_k and (problem := experts_down.unsupported_reason(call, gpu)):
        raise ValueError(problem)
    config = experts_down.choose(call, gpu)
    return None if config is None else partial(experts_down.plan, config)


def _plan(launch: Callable[[Call, Gpu], Plan], call_of: Callable[[int], Call], rows: int, gpu: Gpu) -> Plan:
    """Return a launch's plan with variables for rows, strides of x and mask weights, SMs and shared memory."""
    call = call_of(Size(rows, "rows"))
    x, weights = call.x, call.mask_weights
    traced = replace(
        call,
        x=Layout(_named(x, "x_row_stride", "x_column_stride")),
        mask_weights=Layout(_named(weights, "mask_weight_row_stride", "mask_weight_column_stride")),
    )
    any_gpu = replace(
        gpu,
        multiprocessors=Size(gpu.multiprocessors, "multiprocessors"),
        shared_bytes_per_sm=Size(gpu.shared_bytes_per_sm, "shared_bytes_per_sm"),
    )
    return tuple(map(_at_run_time, launch(traced, any_gpu)))


def _named(layout: Layout, *names: str) -> tuple[int, ...]:
    return tuple(Size(stride, name) for stride, name in zip(layout.strides, names, strict=True))


def _at_run_time(step: Step) -> Step:
    """Return the step with variables in place of two constants: the alignment of x and the bytes of an id."""

    def values(integers: dict[str, int]) -> dict[str, int]:
        found = dict(integers)
        if "id_bytes" in found:
            found["id_bytes"] = Size(found["id_bytes"], "id_bytes")
        if text(found.get("x_row_stride", 0)) == "x_row_stride":  # false for a copy of x
            found["x_is_vectorizable"] = Size(found["x_is_vectorizable"], "x_is_vectorizable")
        return found

    items = None if step.items is None else values(dict(step.items))
    return replace(step, integers=values(dict(step.integers)), items=items)


# --- Plans for any layer ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AnyLayerPlan:
    """A plan for layers of any shape, in tensors of any layout.

    Attributes:
        rounds_x: True if the plan rounds x to `fp8_token`.
        has_experts: True for layers of experts.
        is_sorted: True if the rows of x are sorted by expert.
        first_rows: the least rows of x; 1 or 2.
        last_rows: the most rows of x.
        plan: the steps. Their targets are empty if the kernels are compiled where they run.
    """

    rounds_x: bool
    has_experts: bool
    is_sorted: bool
    first_rows: int
    last_rows: int
    plan: Plan


def any_layer_plans() -> Iterator[AnyLayerPlan]:
    """Yield the plans by which the kernel `plain` runs any call. The numbers in their macros are `Size`s too."""
    codes = {
        "MGLU_ELEMENT": "element",
        "MGLU_WEIGHT_FORMAT": "weight_format",
        "MGLU_N_MASKS": "n_masks",
        "MGLU_ACTIVATION": "activation",
        "MGLU_MASK_WEIGHTS": "mask_weights",
    }
    layer = Call.contiguous(torch.device("cuda"), torch.float32, 1, 1, 64, 64)
    for has_experts, is_sorted in ((False, False), (True, False), (True, True)):
        for rounds_x in (False, True):
            one = replace(layer, activation_format="fp8_token" if rounds_x else "dense")
            for found in plans_for_any_shape(one, Gpu("any", (9, 0), 1, 1 << 20, 2048), has_experts, is_sorted):
                steps = (
                    replace(
                        step,
                        target="",
                        macros={
                            name: Size(value, codes[name]) if name in codes else value
                            for name, value in step.macros.items()
                        },
                    )
                    for step in found.plan
                )
                yield replace(found, plan=tuple(steps))


def plans_for_any_shape(layer: Call, gpu: Gpu, has_experts: bool, is_sorted: bool) -> Iterator[AnyLayerPlan]:
    """Yield the plans of `plain` for one token and for more. They run layers of any shape, in the dtypes of `layer`."""
    for block_tokens, first, last in ((1, 1, 1), (4, 2, group_tokens.MOST_ROWS if has_experts else _MOST_ROWS)):
        call = _of_any_shape(replace(layer, leading=(Size(block_tokens, "rows"),)))
        if not has_experts:
            plan = quantize_x.plan(Plain(block_tokens=block_tokens), call, gpu)
        else:
            top_k = None if is_sorted else Size(1, "top_k")
            rows = (Size(block_tokens, "rows"),)
            call = replace(
                call.over_experts(Size(1, "experts"), 1, top_k), leading=rows if top_k is None else (*rows, top_k)
            )
            plan = experts.ExpertLaunch(Plain(block_tokens=block_tokens), grouped=True).plan(call, gpu)
        yield AnyLayerPlan(
            layer.activation_format != "dense",
            has_experts,
            is_sorted,
            first,
            last,
            tuple(_of_any_layout(_at_run_time(step), block_tokens) for step in plan),
        )


def _of_any_shape(call: Call) -> Call:
    return replace(
        call,
        out_features=Size(call.out_features, "out_features"),
        in_features=Size(call.in_features, "in_features"),
        x=Layout(_named(call.x, "x_row_stride", "x_column_stride")),
        weight=StoredWeight(
            call.weight.format,
            call.weight.dtype,
            Layout(_named(call.weight.layout, "weight_row_stride", "weight_column_stride")),
        ),
        masks=Layout(_named(call.masks, "mask_row_stride", "mask_octet_stride", "mask_stride")),
        mask_weights=Layout(_named(call.mask_weights, "mask_weight_row_stride", "mask_weight_column_stride")),
    )


def _of_any_layout(step: Step, block_tokens: int) -> Step:
    """Return the step with variables for the bytes between experts and for the element size of a rounded x."""
    integers, items, nbytes = dict(step.integers), step.items, step.nbytes
    row = Size(64, "in_features") * Size(4, "element_bytes")
    if text(integers.get("x_row_stride", 0)) == "in_features" and block_tokens > 1:
        integers["x_is_vectorizable"] = 1 - least(row - row // 16 * 16, 1)
    if step.writes == "x":
        nbytes = step.grid[0] * row
    if items is not None:
        items = {
            **items,
            "weight_stride": Size(items["weight_stride"], "expert_weight_bytes"),
            "mask_stride": Size(items["mask_stride"], "expert_mask_bytes"),
            "scale_stride": Size(items["scale_stride"], "expert_scale_bytes"),
        }
    return replace(step, integers=integers, items=items, nbytes=nbytes)
