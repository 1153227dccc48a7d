"""Layers of experts, which become `mglu::grouped_forward` or `mglu::grouped_forward_ste`.

Either x is `[experts, tokens, in_features]` and the product is batched, or x is `[rows, in_features]` with rows sorted
by expert and the product is `grouped_mm`. A loop over experts becomes one dense layer per expert.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_passes import proof
from compile_passes.exported import fuse_exported
from tests.support.budgets import BUDGET
from tests.support.families import sample
from tests.support.programs.compiled import operators, saved_and_loaded
from tests.support.programs.graphs import Capture, assert_same, known_of_shapes, results
from tests.support.programs.perturbations import program, through_the_pass
from tests.support.programs.perturbations import sample as sample_perturbed
from tests.support.programs.right_programs import EXPERTS, draw
from tests.support.programs.spellings import from_source, straight_through

SAME = 10 * BUDGET[torch.float64]
E, T, D, H, MASKS = 4, 8, 8, 8, 2
"""Numbers of experts, tokens, output features, input features and masks.

D equals H, so that the shape of a weight does not tell if it is transposed.
"""

TRAINED, FIXED = ("x", "w", "l"), ()


def tensors(trained: tuple[str, ...] = FIXED, dtype: torch.dtype = torch.float64, tokens: int = T) -> dict[str, Tensor]:
    """The tensors x `[E, tokens, H]`, the weights w and o `[E, D, H]`, and logits l `[E, MASKS, D, H]`."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (E, tokens, H), "w": (E, D, H), "l": (E, MASKS, D, H), "o": (E, D, H)}
    named = {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}
    return {name: t.requires_grad_(name in trained) for name, t in named.items()}


def compiled(source: str, trained: tuple[str, ...] = FIXED, **options: Any) -> Capture:
    """Compile a program of x, w, l and o, and compare its results and gradients with eager's."""
    layer = from_source("x, w, l, o", source, {})
    capture = Capture(**options)
    assert_same(results(capture.compile(layer), tensors(trained)), results(layer, tensors(trained)), SAME)
    return capture


def fused(source: str, trained: tuple[str, ...] = FIXED, **options: Any) -> Capture:
    """Compile a program that must become one operator, which replaces all products."""
    capture = compiled(source, trained, strict=True, **options)
    operator = "grouped_forward_ste" if "l" in trained else "grouped_forward"
    assert [site.operator for site in capture.report.fused] == [operator]
    assert not any(capture.calls[name] for name in ("matmul", "einsum", "silu"))
    return capture


# Products of x and the masked weight {a}
PRODUCTS = {
    "bmm": "torch.bmm(x, ({a}).transpose(-2, -1))",
    "method": "x.bmm(mat2=({a}).mT)",
    "matmul": "torch.matmul(x, ({a}).permute(0, 2, 1))",
    "@": "x @ ({a}).swapaxes(1, 2)",
    "einsum": "einsum('eth,edh->etd', x, {a})",
    "einsum, weight first": "einsum('abc,adc->adb', {a}, x)",
    "weight [E, h, d]": "x @ ({a})",
    "einsum, weight [E, h, d]": "einsum('eth,ehd->etd', x, {a})",
}

# Statements that make the mask m{i} from the logits l
MASKS_OF_LOGITS = {
    "slice": "m{i} = ste(l[:, {i}])",
    "slice of all": "M = ste(l); m{i} = M[:, {i}]",
    "select": "M = ste(l); m{i} = M.select(1, {i})",
    "unbind": "M = ste(l); m{i} = M.unbind(1)[{i}]",
    "one for each mask": "k{i} = l[:, {i}] * 1; m{i} = ste(k{i})",
    "autograd.Function": "m{i} = Sign.apply(l[:, {i}])",
}
BOOL_MASKS = {
    "comparison": "m{i} = l[:, {i}] > 0",
    "comparison of all": "M = l > 0; m{i} = M[:, {i}]",
    "unbind": "M = (l > 0).unbind(1); m{i} = M[{i}]",
    "of its own": "k{i} = l.cos()[:, {i}]; m{i} = k{i} > 0.5",
}


def layer(product: str, masks: str, gate: str = "w * m{i}", value: str = "w * (1 - m{i})") -> str:
    """The source of a layer. The parts are templates for mask i: the product, the masks, and the masked weights."""
    g, v = (f"({product.format(a=a)})" for a in (gate, value))
    terms = [f"{masks}; y{{i}} = silu({g}) * {v}".format(i=i) for i in range(MASKS)]
    return "; ".join([*terms, " + ".join(f"y{i}" for i in range(MASKS))])


@pytest.mark.parametrize("product", PRODUCTS)
def test_products(product: str) -> None:
    """Each product is recognised in inference and in training, and the masks are read without copies."""
    source = PRODUCTS[product]
    assert fused(layer(source, BOOL_MASKS["comparison"], value="w * ~m{i}")).calls["stack"] == 0
    assert fused(layer(source, MASKS_OF_LOGITS["slice"]), TRAINED).calls["stack"] == 0


@pytest.mark.parametrize("masks", MASKS_OF_LOGITS)
def test_trained_masks(masks: str) -> None:
    """The operator reads the logits from one tensor of the program that holds all of them, or else from a new stack."""
    capture = fused(layer(PRODUCTS["bmm"], MASKS_OF_LOGITS[masks]), TRAINED)
    assert capture.calls["stack"] == (masks in ("one for each mask", "autograd.Function"))
    assert capture.calls["detach"] == 0


@pytest.mark.parametrize("masks", BOOL_MASKS)
def test_fixed_masks(masks: str) -> None:
    """With fixed masks, the weight and x still receive their gradients."""
    capture = fused(layer(PRODUCTS["bmm"], BOOL_MASKS[masks], value="w * ~m{i}"), ("x", "w"))
    assert capture.calls["stack"] == (masks == "of its own")


FORMS = {
    "where": ("where(m{i}, w, 0)", "where(m{i}, 0, w)"),
    "masked_fill": ("w.masked_fill(~m{i}, 0)", "w.masked_fill(m{i}, 0)"),
    "difference": ("w * m{i}", "w - w * m{i}"),
    "comparisons": ("w * (l[:, {i}] > 0)", "w * (l[:, {i}] <= 0)"),
    "copy": ("w.clone() * m{i}", "w * m{i}.logical_not()"),
    "computed weight": ("(o @ w) * m{i}", "(o @ w) * ~m{i}"),
    "shared mask": ("w * m{i}[0].expand(4, -1, -1)", "w * ~m{i}[0].expand(4, -1, -1)"),
}


@pytest.mark.parametrize("form", FORMS)
def test_masked_weights(form: str) -> None:
    gate, value = FORMS[form]
    source = layer(PRODUCTS["bmm"], BOOL_MASKS["comparison"], gate, value)
    capture = compiled(source, ("x", "w"), strict=True)
    assert [site.n_masks for site in capture.report.fused] == [MASKS]
    assert capture.calls["matmul"] == (form == "computed weight")


TERM, OTHER = "silu(x @ (w * m).mT) * (x @ (w * ~m).mT)", "silu(x @ (w * ~m).mT) * (x @ (w * m).mT)"
PARTS = {
    "difference of products": "t = x @ w.mT; g = x @ (w * m).mT; silu(g) * (t - g)",
    "transposed before it is masked": "v = w.mT; silu(x @ (v * m.mT)) * (x @ (v * ~m.mT))",
    "mask weights": f"r = x.sigmoid(); {TERM} * r[..., :1] + {OTHER} * r[..., 3:4]",
    "number and residual": f"x + 0.5 * ({TERM})",
    "stack of terms": f"stack([{TERM}, {OTHER}]).sum(0)",
    "one expert": f"x, w, m = x[:1], w[:1], m[:1]; {TERM}",
    "weights that are stacked": f"w = stack([w[0], o[1], w[2], o[0]]); {TERM}",
}


@pytest.mark.parametrize("part", PARTS)
def test_other_parts_of_a_layer(part: str) -> None:
    fused(f"m = l[:, 0] > 0; {PARTS[part]}", ("x", "w"))


def test_float_masks() -> None:
    """A float mask is fused only under `assume_binary`."""
    source = "silu(x @ (w * o).mT) * (x @ (w * (1 - o)).mT)"
    assert "nothing proves to be binary" in compiled(source).reasons[0]
    function = from_source("x, w, m", "silu(x @ (w * m).mT) * (x @ (w * (1 - m)).mT)", {})
    named = tensors()
    given = {"x": named["x"], "w": named["w"], "m": (named["o"] > 0).double()}
    capture = Capture(strict=True, assume_binary=True)
    assert_same(results(capture.compile(function), given), results(function, given), SAME)
    assert capture.calls["mglu.grouped_forward"] == 1


def test_operators_that_the_program_calls() -> None:
    """If the program itself calls the operators, the report lists these calls under `present`."""
    source = (
        "e = torch.arange(1, 5, dtype=torch.int32) * 8; r = x.flatten(0, 1); "
        "p = torch.zeros(4, 8, 1, 2, dtype=torch.uint8); "
        "y = torch.ops.mglu.grouped_forward(r, w, p, e, activation='relu'); "
        "torch.ops.mglu.grouped_forward_ste(r, w, l, e)[0] + y"
    )
    present = compiled(source).report.present
    assert [(site.operator, site.n_masks, site.activation) for site in present] == [
        ("grouped_forward", MASKS, "relu"),
        ("grouped_forward_ste", MASKS, "silu"),
    ]


# --- Programs that are not layers of experts -------------------------------------------------------------------------

REFUSED = {
    "silu(x @ (w * m).mT) * (x.flip(0) @ (w * ~m).mT)": "project different inputs",
    "silu(x @ (w * m).mT) * (x @ (o * ~m).mT)": "mask different weights",
    "silu(x @ (w * m)) * (x @ (w * ~m).mT)": "different orientations",
    "silu(x @ (w * m).mT) * (x @ (w * m.flip(0)).mT)": "two different masks",
    "silu(x @ (w * m[0]).mT) * (x @ (w * ~m[0]).mT)": "expand a mask that experts share",
    "g = x @ (w * m).mT; w.mul_(2); silu(g) * (x @ (w * ~m).mT)": "mask different weights",
    "g = x @ (w * m).mT; x.add_(1); silu(g) * (x @ (w * ~m).mT)": "project different inputs",
    "g = x @ (w * m).mT; (silu(g) * (x @ (w * ~m).mT), g)": "which the operator would replace",
    "torch.sin(x @ (w * m).mT) * (x @ (w * ~m).mT)": "reads a product with a masked weight by `sin`",
    # Products that broadcast x or the weight, or that differ from the operator's product in another way
    "silu(x[:1] @ (w * m).mT) * (x[:1] @ (w * ~m).mT)": "by `matmul`",
    "silu(x[0] @ (w * m).mT) * (x[0] @ (w * ~m).mT)": "by `matmul`",
    "silu(x @ (w[:1] * m[:1]).mT) * (x @ (w[:1] * ~m[:1]).mT)": "by `matmul`",
    "silu(torch.inner(x, w * m)) * torch.inner(x, w * ~m)": "by `inner`",
    "silu(torch.baddbmm(x, x, (w * m).mT)) * torch.baddbmm(x, x, (w * ~m).mT)": "by `baddbmm`",
    "silu(einsum('teh,edh->ted', x[:, :4], w * m)) * einsum('teh,edh->ted', x[:, :4], w * ~m)": "by `einsum`",
    "silu(einsum('eth,edh->edt', x, w * m)) * einsum('eth,edh->edt', x, w * ~m)": "by `einsum`",
    "silu(einsum('eth,eht->et', x, w * m)) * einsum('eth,eht->et', x, w * ~m)": "by `einsum`",
    "silu(einsum('eth,edh,edh->etd', x, w, m.double())) * einsum('eth,edh->etd', x, w * ~m)": "by `einsum`",
    # A stack of masks that multiply one weight, which are not the masks of experts
    "silu(x @ (w[0] * m).mT) * (x @ (w[0] * ~m).mT)": "by `matmul`",
    # Weights of experts that are masked together, before one expert is selected or two weights are concatenated
    "a, b = w * m, w * ~m; silu(linear(x[0], a[0])) * linear(x[0], b[0])": "by `getitem`",
    "y = x @ cat([w * m, w * ~m], 1).mT; silu(y[..., :8]) * y[..., 8:]": "by `cat`",
}


@pytest.mark.parametrize("source", sample(REFUSED, every=2))
def test_refused(source: str) -> None:
    """A refused program is unchanged, and the report gives the reason."""
    capture = compiled(f"x, w, m = x * 1, w * 1, l[:, 0] > 0; {source}", ("x", "w") if "_(" not in source else ())
    assert capture.report.fused == []
    assert any(REFUSED[source] in reason for reason in capture.reasons), capture.reasons


@pytest.mark.parametrize(
    "source",
    [
        "silu(linear(x * real, w[0])) * linear(x, w[0])",
        "silu(x @ (x * real).mT) * (x @ x.mT)",
        "(x @ w.mT).masked_fill(~real, 0) @ o",
        "silu(x @ w.mT) * (x @ o.mT)",
    ],
)
def test_ordinary_products(source: str) -> None:
    """A mask that marks padding tokens is not taken for a mask of weights."""
    assert compiled(f"real = (l > 0)[:, 0, :, :1]; {source}").reasons == []


def test_a_slope_that_does_not_pass() -> None:
    source = layer(PRODUCTS["bmm"], MASKS_OF_LOGITS["slice"], value="w * (m{i} < 0.5)")
    assert "does not pass straight through" in compiled(source, TRAINED).reasons[0]


def test_experts_for_which_the_host_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, no backend runs experts in float64 without reading on the host which rows each expert has."""
    asked: list[str] = []
    monkeypatch.setattr(proof, "waiting_reason", lambda task, device, dtype: asked.append(task) or "the host waits")
    source = f"m = l[:, 0] > 0; {TERM}"
    for wanted in (("x",), ()):
        reasons = compiled(source, wanted).reasons
        assert reasons == ["the operator of experts of torch.float64 on cpu would be slow: the host waits"]
    assert set(asked) == {"train", "forward"}


def test_experts_of_dtensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof.shapes, "is_distributed", lambda node: True)
    assert "is a DTensor" in compiled(f"m = l[:, 0] > 0; {TERM}").reasons[0]


# --- grouped_mm ------------------------------------------------------------------------------------------------------

ROWS, ENDS = 13, (4, 4, 10, 12)
GROUPED = {
    "public": "F.grouped_mm(x, ({a}).transpose(-2, -1), offs=offs)",
    "private": "torch._grouped_mm(x, ({a}).mT, offs)",
    "keywords": "torch._grouped_mm(input=x, mat2=({a}).mT, offs=offs, bias=None)",
}


def grouped_tensors(trained: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors of `tensors` in bfloat16, with x `[ROWS, H]`, and offs. The last row of x belongs to no expert."""
    named = tensors(dtype=torch.bfloat16)
    named["x"] = named["x"].flatten(0, 1)[:ROWS]
    named = {name: t.detach().requires_grad_(name in trained) for name, t in named.items()}
    return named | {"offs": torch.tensor(ENDS, dtype=torch.int32)}


def grouped(source: str, trained: tuple[str, ...]) -> Capture:
    """Compile a program of `grouped_tensors`, and compare the rows of experts with eager's.

    `grouped_mm` leaves the rows after the last offset undefined.
    """
    whole = from_source("x, w, l, o, offs", source, {})

    def function(**named: Tensor) -> Tensor:
        return whole(**named)[: ENDS[-1]]

    capture = Capture()
    found, wanted = (results(f, grouped_tensors(trained)) for f in (capture.compile(function), function))
    for grads in (found, wanted):
        if grads.get("x") is not None:
            grads["x"] = grads["x"][: ENDS[-1]]
    assert_same(found, wanted, 2 * BUDGET[torch.bfloat16])
    return capture


@pytest.mark.parametrize("product", GROUPED)
@pytest.mark.parametrize("trained", [TRAINED, FIXED])
def test_grouped_mm(product: str, trained: tuple[str, ...]) -> None:
    masks = MASKS_OF_LOGITS["slice of all"] if trained else BOOL_MASKS["comparison"]
    capture = grouped(layer(GROUPED[product], masks, value="w * (1 - m{i})" if trained else "w * ~m{i}"), trained)
    operator = "grouped_forward_ste" if trained else "grouped_forward"
    assert [(site.operator, site.n_masks) for site in capture.report.fused] == [(operator, MASKS)]
    assert capture.calls["grouped_mm"] == capture.calls["arange"] == 0


G, V = (GROUPED["public"].format(a=a) for a in ("w * m", "w * ~m"))
WITH_OTHER_OFFSETS = {
    "another tensor": f"silu({G}) * torch._grouped_mm(x, (w * ~m).mT, other)",
    "a write between the products": f"g = {G}; offs[:1].sub_(2); silu(g) * {V}",
}


@pytest.mark.parametrize("way", WITH_OTHER_OFFSETS)
def test_other_offsets(way: str) -> None:
    names = "offs, m, other = offs * 1, l[:, 0] > 0, (offs + 3).clamp(max=12)"
    capture = grouped(f"{names}; {WITH_OTHER_OFFSETS[way]}", FIXED)
    assert capture.report.fused == []
    assert "by different offsets" in capture.reasons[0]


def test_offsets_that_are_written_later() -> None:
    """Backward reads the offsets, so a write after the layer matters in training only."""
    source = f"offs, m = offs * 1, l[:, 0] > 0; y = silu({G}) * {V}; offs[:1].sub_(2); y"
    assert len(grouped(source, FIXED).report.fused) == 1
    capture = Capture()
    capture.compile(from_source("x, w, l, o, offs", source, {}))(**grouped_tensors(("x", "w")))
    assert "which backward needs" in capture.reasons[0]


# --- Sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [TRAINED, FIXED])
def test_a_symbolic_number_of_tokens(trained: tuple[str, ...]) -> None:
    """One compilation serves all numbers of tokens, because the pass adds no guard."""
    function = from_source("x, w, l, o", layer(PRODUCTS["bmm"], MASKS_OF_LOGITS["slice"]), {})
    capture, plain = Capture(strict=True), Capture(fuse=False)
    known = []
    for backend in (plain, capture):
        run = backend.compile(function)
        for tokens in (T, 3, 2):
            given = tensors(trained, tokens=tokens)
            torch._dynamo.mark_dynamic(given["x"], 1)
            assert_same(results(run, given), results(function, tensors(trained, tokens=tokens)), SAME)
        (graph,) = backend.after
        examples = [node.meta["example_value"] for node in graph.find_nodes(op="placeholder")]
        (mode,) = {value.fake_mode for value in examples if isinstance(value, Tensor)}
        known.append(known_of_shapes(mode))
    assert known[0] == known[1]
    assert capture.calls["size"] == 1


def test_no_tokens() -> None:
    function = from_source("x, w, l, o", layer(PRODUCTS["bmm"], MASKS_OF_LOGITS["slice"]), {})
    capture = Capture(strict=True)
    run = capture.compile(function, dynamic=False)
    assert_same(results(run, tensors(TRAINED, tokens=0)), results(function, tensors(TRAINED, tokens=0)), 0)
    assert len(capture.report.fused) == 1


def test_a_symbolic_number_of_experts() -> None:
    function = from_source("x, w, l, o", layer(PRODUCTS["bmm"], BOOL_MASKS["comparison"], value="w * ~m{i}"), {})
    capture = Capture(strict=True)
    assert_same(results(capture.compile(function, dynamic=True), tensors()), results(function, tensors()), SAME)


# --- Loops -----------------------------------------------------------------------------------------------------------

LOOPS = {
    "logits of the expert": "m = ste(l[e, i])",
    "masks of the expert": "m = ste(l[e])[i]",
    "masks of all": "m = M[e, i]",
    "masks of all, twice": "m = M[e][i]",
    "mask i of all": "m = M[:, i][e]",
}


@pytest.mark.parametrize(
    ("masks", "trained"),
    [*((masks, TRAINED) for masks in LOOPS), ("masks of all", ("x", "w")), ("masks of all", FIXED)],
)
def test_loops_over_experts(masks: str, trained: tuple[str, ...]) -> None:
    """Each expert is a layer of its own. Its weight is a view of the stacked weight, which receives all gradients."""

    def function(x: Tensor, w: Tensor, l: Tensor, o: Tensor) -> Tensor:
        space: dict[str, Any] = {"ste": straight_through, "M": straight_through(l)}
        outputs = []
        for e in range(E):
            y: Any = 0
            for i in range(MASKS):
                m = of_expert(space["M"], l, e, i)
                y = y + F.silu(F.linear(x[e], w[e] * m)) * F.linear(x[e], w[e] * (1 - m))
            outputs.append(y)
        return torch.stack(outputs)

    of_expert = from_source("M, l, e, i", f"{LOOPS[masks]}; m", {})
    capture = Capture(strict=True)
    assert_same(results(capture.compile(function), tensors(trained)), results(function, tensors(trained)), SAME)
    operator = "forward_ste" if "l" in trained else "forward"
    assert [(site.operator, site.n_masks) for site in capture.report.fused] == [(operator, MASKS)] * E
    assert capture.calls["linear"] == 0


def test_a_loop_that_writes_to_the_stacked_weight() -> None:
    """A write to one expert's weight counts as a write to the storage that holds the weights of all experts."""
    body = "[gated(x[e], w[e], m[e], ~m[e]) for e in range(4)]"
    layer_of = "w = w * 1; m = l[:, 0] > 0; y = {}; w[1].mul_(2); stack(y)".format
    assert len(compiled(layer_of(body)).report.fused) == E
    training = Capture()
    training.compile(from_source("x, w, l, o", layer_of(body), {}))(**tensors(("x",)))
    assert "which backward needs" in training.reasons[0]
    between = "g = linear(x[0], w[0] * m[0]); w.mul_(2); silu(g) * linear(x[0], w[0] * ~m[0])"
    assert compiled(f"w, m = w * 1, l[:, 0] > 0; {between}").report.fused == []


# --- Exported programs and random programs ---------------------------------------------------------------------------


class _Experts(nn.Module):
    def __init__(self, source: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(E, D, H).bfloat16())
        self.mask_logits = nn.Parameter(torch.randn(E, MASKS, D, H).bfloat16())
        self.function = from_source("x, w, l, offs", source, {})

    def forward(self, x: Tensor, offs: Tensor | None = None) -> Tensor:
        return self.function(x, self.w, self.mask_logits, offs)


@pytest.mark.parametrize("product", ["bmm", "einsum", "grouped_mm"])
def test_exported(product: str) -> None:
    """The masks are packed during export, and the program accepts any number of tokens."""
    projection = GROUPED["public"] if product == "grouped_mm" else PRODUCTS[product]
    model = _Experts(layer(projection, MASKS_OF_LOGITS["slice"]))
    offs = (torch.tensor(ENDS, dtype=torch.int32),) if product == "grouped_mm" else ()

    def given(tokens: int) -> tuple[Tensor, ...]:
        return (torch.randn(*((ROWS,) if offs else (E, tokens)), H).bfloat16(), *offs)

    shapes = None if offs else ({1: torch.export.Dim.AUTO},)
    with torch.no_grad():
        exported = torch.export.export(model, given(T), dynamic_shapes=shapes)
    fused_program = fuse_exported(exported, strict=True)
    assert operators(fused_program) == ["mglu.grouped_forward.default"]
    assert set(fused_program.state_dict) == {"w", "packed_masks"}
    for run in (fused_program, saved_and_loaded(fused_program)):
        inputs = given(5)
        last = ENDS[-1] if offs else None
        found, wanted = run.module()(*inputs)[:last], model(*inputs)[:last].detach()
        assert_same({"y": found}, {"y": wanted}, 2 * BUDGET[torch.bfloat16])


@pytest.mark.parametrize("seed", sample(range(EXPERTS, EXPERTS + 60), every=20))
def test_right_program(seed: int) -> None:
    assert through_the_pass(draw(seed)) == "fused"


@pytest.mark.parametrize("number", sample(range(20 * EXPERTS, 20 * EXPERTS + 100), every=20))
def test_perturbed_program(number: int) -> None:
    changed = program(*sample_perturbed(number))
    try:
        through_the_pass(changed)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{changed}") from error
