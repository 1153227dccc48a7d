"""The nodes that replace a layer, for handmade layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Graph

from compile_passes.evaluate import Evaluation
from compile_passes.formulas import VARIABLE
from compile_passes.proof import Layer
from compile_passes.report import line
from compile_passes.rewrite import replacement
from compile_passes.sites import Site
from compile_passes.values import Carrier, Gated, Mask, MaskWeight, Projection, Term
from compile_passes.view import View

EXAMPLES = {
    "x": torch.zeros(5, 8),
    "x3": torch.zeros(2, 5, 8),
    "weight": torch.zeros(4, 8),
    "stored": torch.zeros(8, 4),  # a weight or mask [in_features, out_features]
    "stored_bits": torch.zeros(2, 8, 4, dtype=torch.bool),
    "bits": torch.zeros(2, 4, 8, dtype=torch.bool),
    "more": torch.zeros(3, 4, 8, dtype=torch.bool),
    "one": torch.zeros(4, 8, dtype=torch.bool),
    "real": torch.zeros(2, 4, 8),
    "whole": torch.zeros(2, 4, 8, dtype=torch.int64),
    "logits": torch.zeros(2, 4, 8),
    "columns": torch.zeros(5, 2),
    "columns3": torch.zeros(2, 5, 2),
    "rows": torch.zeros(2, 5),
    "stack": torch.zeros(2, 5, 1),
    "column": torch.zeros(5, 1),
    "numbers": torch.zeros(2),
    "number": torch.zeros(()),
    "rest": torch.zeros(5, 4),
}


def masks_of(bits: Any, *indices: int | None, complement: bool = False, **more: Any) -> Any:
    """Masks of a layer: the slices of the stack `bits` at `indices`. The name of a tensor stands for its node."""
    return [(Mask(bits, (bits, i), **{"proof": "bool", "index": i, **more}), complement) for i in indices]


def trained(node: Any, *indices: int, logits: Any = None, complement: bool = False) -> Any:
    """Straight-through masks of a layer: the slices at `indices` of the stack that `node` holds."""
    return [
        (Mask(node, (node, i), "straight-through", Carrier(node, (node, i), logits, i), i), complement) for i in indices
    ]


BOTH = masks_of("bits", 0, 1)


def made(masks: Any, weights: Any = (), **changes: Any) -> str:
    """The new nodes of a layer, as a text of their calls."""
    graph = Graph()
    for name, example in EXAMPLES.items():
        graph.placeholder(name).meta["example_value"] = example
    named = {node.name: node for node in graph.nodes}
    for name, start in (("first_column", 0), ("last_column", 1)):
        column = graph.create_node("call_method", "narrow", (named["columns3"], -1, start, 1), name=name)
        column.meta["example_value"] = torch.zeros(2, 5, 1)
    result = graph.call_function(torch.exp, (named["rest"],))
    shape, dtype = EXAMPLES[changes.get("x", "x")].shape, changes.get("dtype", torch.float32)
    result.meta["example_value"] = torch.zeros(*shape[:-1], 4, dtype=dtype)
    graph.output(result)
    view = View(graph)
    nodes = {node.name: node for node in view.graph.nodes}

    def held(value: Any) -> Any:
        if isinstance(value, (Mask, Carrier, MaskWeight)):
            fields = ("bits", "node", "logits", "carrier")
            return replace(value, **{name: held(getattr(value, name)) for name in fields if hasattr(value, name)})
        return nodes.get(value, value) if isinstance(value, str) else value

    changes = {name: held(value) for name, value in changes.items()}
    x, weight = changes.pop("x", nodes["x"]), changes.pop("weight", nodes["weight"])
    projection = Projection(x, weight, None, torch.float32)
    rest = changes.pop("rest", None)
    site = Site(nodes["exp"], Gated((Term(VARIABLE, projection, projection),), rest, rest_first=True))
    layer = Layer(
        **{
            **{"site": site, "x": x, "weight": weight, "weight_scale": 1, "transposed": False, "activation": "silu"},
            **{"masks": tuple((held(mask), c) for mask, c in masks), "mask_weights": tuple(map(held, weights))},
            **{"dtype": torch.float32, "trains_masks": False, "scale": 1.0, "interior": (nodes["exp"],)},
            **changes,
        }
    )
    return "; ".join(line(node).partition(" = ")[2] for node in replacement(Evaluation(view), layer).nodes)


PACKED_STACK = "mglu.pack_masks(stack_1)"
LAYER = "mglu.pack_masks(bits); mglu.forward(x, weight, pack_masks_default, silu, None)"


@pytest.mark.parametrize(
    ("masks", "calls"),
    [
        (BOTH, "mglu.pack_masks(bits)"),
        (masks_of("bits", 1, 0), "mglu.pack_masks(bits)"),
        (masks_of("one", None), "unsqueeze(one, 0); mglu.pack_masks(unsqueeze)"),
        (masks_of("bits", 0), "getitem(bits, 0); unsqueeze(getitem, 0); mglu.pack_masks(unsqueeze)"),
        (masks_of("more", 0, 1), f"getitem(more, 0); getitem(more, 1); stack([getitem, getitem_1]); {PACKED_STACK}"),
        # Complements
        (masks_of("bits", 0, 1, complement=True), "eq(bits, 0); mglu.pack_masks(eq)"),
        (masks_of("bits", 0, 1, inverted=True), "eq(bits, 0); mglu.pack_masks(eq)"),
        (masks_of("bits", 0, 1, inverted=True, complement=True), "mglu.pack_masks(bits)"),
        (
            [*masks_of("bits", 0), *masks_of("bits", 1, complement=True)],
            f"getitem(bits, 0); getitem(bits, 1); eq(getitem_1, 0); stack([getitem, eq]); {PACKED_STACK}",
        ),
        # Masks that are not bool
        (masks_of("real", 0, 1), "gt(real, 0); mglu.pack_masks(gt)"),
        (masks_of("whole", 0, 1), "ne(whole, 0); mglu.pack_masks(ne)"),
        (masks_of("real", 0, 1, proof=None), "mglu.pack_masks(real)"),
        (masks_of("real", 0, 1, proof=None, complement=True), "sub(1, real); mglu.pack_masks(sub)"),
        # Comparisons of logits
        (masks_of("bits", 0, 1, logits="logits"), "mglu.pack_logits(logits)"),
        (masks_of("bits", 0, 1, logits="whole"), "mglu.pack_masks(bits)"),
        (masks_of("bits", 0, 1, logits="logits", complement=True), "eq(bits, 0); mglu.pack_masks(eq)"),
        ([*masks_of("bits", 0, logits="logits"), *masks_of("bits", 1)], "mglu.pack_masks(bits)"),
        (masks_of("bits", 0, logits="logits"), "getitem(bits, 0); unsqueeze(getitem, 0); mglu.pack_masks(unsqueeze)"),
    ],
)
def test_packed_masks(masks: Any, calls: str) -> None:
    packed = calls.rpartition("mglu.")[2].partition("(")[0]
    assert made(masks) == f"{calls}; mglu.forward(x, weight, {packed}_default, silu, None)"


STE = "mglu.forward_ste(x, weight, {}, silu, None); getitem(forward_ste_default, 0)"


@pytest.mark.parametrize(
    ("masks", "calls"),
    [
        (trained("real", 0, 1, logits="logits"), STE.format("logits")),
        (trained("real", 0, 1), f"sub(real, 0.5); {STE.format('sub')}"),
        ([*trained("real", 0, logits="logits"), *trained("real", 1)], f"sub(real, 0.5); {STE.format('sub')}"),
        (trained("real", 1), f"getitem(real, 1); unsqueeze(getitem, 0); sub(unsqueeze, 0.5); {STE.format('sub')}"),
        (
            [*trained("real", 0, logits="logits", complement=True), *trained("real", 1, logits="logits")],
            "getitem(real, 0); getitem(real, 1); sub(0.5, getitem); sub(getitem_1, 0.5); stack([sub, sub_1]); "
            + STE.format("stack_1"),
        ),
    ],
)
def test_trained_masks(masks: Any, calls: str) -> None:
    assert made(masks, trains_masks=True) == calls


@pytest.mark.parametrize(
    ("masks", "changes", "calls"),
    [
        (
            masks_of("stored_bits", 0, 1),
            {"weight": "stored", "transposed": True},
            "transpose(stored, -2, -1); transpose(stored_bits, -2, -1); mglu.pack_masks(transpose_1); "
            "mglu.forward(x, transpose, pack_masks_default, silu, None)",
        ),
        (
            BOTH,
            {"dtype": torch.float16},
            "to(x, torch.float16); to(weight, torch.float16); mglu.pack_masks(bits); "
            "mglu.forward(to, to_1, pack_masks_default, silu, None)",
        ),
        (BOTH, {"scale": 2.0, "rest": "rest"}, f"{LAYER}; mul(forward_default, 2.0); add(rest, mul)"),
        (BOTH, {"scale": -1.0}, f"{LAYER}; mul(forward_default, -1.0)"),
        (BOTH, {"rest": "rest"}, f"{LAYER}; add(rest, forward_default)"),
    ],
)
def test_weight_and_result(masks: Any, changes: dict[str, Any], calls: str) -> None:
    assert made(masks, **changes) == calls


def columns_of(node: Any, dim: int, *indices: int) -> list[MaskWeight]:
    return [MaskWeight(node, dim=dim, index=i) for i in indices]


@pytest.mark.parametrize(
    ("masks", "weights", "calls", "operand"),
    [
        (BOTH, columns_of("columns", 1, 0, 1), "", "columns"),
        (BOTH, columns_of("rows", 0, 0, 1), "movedim(rows, 0, -1)", "movedim"),
        (BOTH, columns_of("stack", 0, 0, 1), "movedim(stack, 0, -1); squeeze(movedim, -2)", "squeeze"),
        (masks_of("bits", 0), columns_of("columns", 1, 1), "narrow(columns, -1, 1, 1); cat([narrow], -1)", "cat"),
        (
            BOTH,
            [MaskWeight("column"), *columns_of("columns", 1, 0)],  # type: ignore[arg-type] # a name for a node
            "narrow(columns, -1, 0, 1); cat([column, narrow], -1)",
            "cat",
        ),
        (
            BOTH,
            [MaskWeight("numbers", True, 0, 1), MaskWeight("number", True)],  # type: ignore[arg-type]
            "narrow(x, -1, 0, 1); select(numbers, 0, 1); reshape(select, 1); expand_as(reshape, narrow); "
            "narrow(x, -1, 0, 1); reshape(number, 1); expand_as(reshape_1, narrow_1); "
            "cat([expand_as, expand_as_1], -1)",
            "cat",
        ),
        (
            BOTH,
            [MaskWeight("column"), 0.5],  # type: ignore[arg-type]
            "narrow(x, -1, 0, 1); full(narrow, 0.5, dtype=torch.float32); cat([column, full_like], -1)",
            "cat",
        ),
    ],
)
def test_mask_weights(masks: Any, weights: Any, calls: str, operand: str) -> None:
    found = made(masks, weights)
    assert found.startswith(calls)
    assert found.endswith(f"; mglu.forward(x, weight, pack_masks_default, silu, {operand})")


@pytest.mark.parametrize("weights", [columns_of("columns", 1, 1, 0), (0.5, 2.0)])
def test_masks_have_the_order_of_their_weights(weights: Any) -> None:
    masks = BOTH if isinstance(weights, list) else masks_of("bits", 1, 0)
    assert f"getitem(bits, 1); getitem(bits, 0); stack([getitem, getitem_1]); {PACKED_STACK}; mglu" in made(
        masks, weights
    )


def test_columns_that_a_program_has_taken() -> None:
    """If the mask weights are columns of one tensor, the operator takes that tensor without new slices."""
    weights = [MaskWeight("first_column"), MaskWeight("last_column")]  # type: ignore[arg-type]
    assert (
        made(BOTH, weights, x="x3").rpartition("; ")[2]
        == "mglu.forward(x3, weight, pack_masks_default, silu, columns3)"
    )
