"""What the pass fuses: exact counts of the graph before and after, the same numbers and gradients, and the report."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budgets import BUDGET, NAIVE_FACTOR, relative_error
from graphs import Capture, assert_same, packings, results
from spellings import (
    BOOL_COMPLEMENTS,
    BOOL_PRODUCTS,
    COMPLEMENTS,
    FIXED,
    PRODUCTS,
    PROJECTIONS,
    SUMS,
    TRAINED,
    Program,
    straight_through,
)
from torch import Tensor, nn
from torch.fx import Graph

from compile_passes.fusion import fuse_graph
from compile_passes.report import FusionReport
from mglu_ops.activations import ACTIVATIONS
from mglu_ops.nn import NaiveMGLU

# Fused and unfused each round within the budget of their dtype.
SAME = 10 * BUDGET[torch.float64]


def model_results(model: nn.Module, x: Tensor, call: Callable[..., Tensor] | None = None) -> dict[str, Tensor | None]:
    """The result and the gradients of x and of all parameters, by name."""
    function = model if call is None else call
    parameters = dict(model.named_parameters())
    return results(lambda x, **_: function(x), {"x": x.detach().requires_grad_(), **parameters})


def masked_products(counts: Counter[str]) -> int:
    return counts["linear"] + counts["matmul"]


def tensors(program: Program, n_masks: int = 3, d: int = 8, h: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(n_masks)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = normal(n_masks, d, h)
    named = {
        "x": normal(5, h),
        "weight": normal(d, h),
        "masks": logits if program.trained else logits > 0,
        "other_x": normal(5, h),
        "other_weight": normal(d, h),
    }
    return {name: t.requires_grad_() if t.is_floating_point() else t for name, t in named.items()}


# --- The paper's layer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n_masks", [1, 2, 4, 16])
def test_naive_layer_in_training(n_masks: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = NaiveMGLU(24, 16, n_masks=n_masks, dtype=dtype)
    shape = (2, 3, 24) if n_masks == 2 else (5, 24)
    x = torch.randn(shape, dtype=dtype)
    naive = model_results(model, x)
    oracle = model_results(copy.deepcopy(model).double(), x.double())
    capture = Capture(strict=True)
    fused = model_results(model, x, capture.compile(model))

    assert masked_products(capture.calls_before) == 2 * n_masks
    assert capture.calls == {"mglu.forward_ste": 1, "getitem": 1}
    for name, wanted in oracle.items():
        bar = max(BUDGET[dtype], NAIVE_FACTOR * relative_error(naive[name], wanted))
        assert fused[name].dtype == dtype
        assert relative_error(fused[name], wanted) <= bar, name


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_naive_layer_with_each_activation(activation: str) -> None:
    torch.manual_seed(1)
    model = NaiveMGLU(16, 12, n_masks=2, activation=activation, dtype=torch.float64)
    x = torch.randn(4, 16, dtype=torch.float64)
    capture = Capture(strict=True)
    assert_same(model_results(model, x, capture.compile(model)), model_results(model, x), SAME)
    assert capture.calls == {"mglu.forward_ste": 1, "getitem": 1}
    assert [site.activation for site in capture.report.fused] == [activation]


@pytest.mark.parametrize("n_masks", [1, 4])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_naive_layer_in_inference_packs_its_masks(mode: Callable[[], Any], n_masks: int) -> None:
    model = NaiveMGLU(16, 12, n_masks=n_masks).eval()
    x = torch.randn(4, 16)
    capture = Capture(strict=True)
    with mode():
        torch.testing.assert_close(capture.compile(model)(x), model(x))
    counts = capture.calls
    assert counts["mglu.pack_logits"] == counts["mglu.forward"] == 1
    assert masked_products(counts) == counts["mul"] == counts["mglu.forward_ste"] == 0
    assert [site.route for site in capture.report.fused] == ["forward"]


def test_eval_and_train_compile_anew() -> None:
    model, x = NaiveMGLU(16, 12), torch.randn(4, 16)
    capture = Capture(strict=True)
    compiled = capture.compile(model)
    compiled(x)
    with torch.no_grad():
        compiled(x)
    compiled(x)
    assert [site.route for site in capture.report.fused] == ["forward_ste", "forward"]


def test_fixed_masks_are_not_packed_again() -> None:
    model, x = NaiveMGLU(16, 12, n_masks=3, learnable_masks=False), torch.randn(4, 16)
    capture = Capture(strict=True)
    assert_same(model_results(model, x, capture.compile(model)), model_results(model, x), 4 * BUDGET[torch.float32])
    assert capture.calls == {"mglu.forward": 1}


def test_routed_layer() -> None:
    torch.manual_seed(2)
    model = NaiveMGLU(16, 12, n_masks=4, top_k=2, dtype=torch.float64)
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    capture = Capture(strict=True)
    assert_same(model_results(model, x, capture.compile(model)), model_results(model, x), SAME)
    assert capture.calls["mglu.forward_ste"] == 1
    assert masked_products(capture.calls) == 1, "the router"


ROUTES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "columns": lambda route, i: route[..., i : i + 1],
    "columns in another order": lambda route, i: route[..., (i + 1) % 3 : (i + 1) % 3 + 1],
    "one column": lambda route, i: route[..., :1],
    "tensors of their own": lambda route, i: route.clone()[..., i : i + 1].exp(),
    "unsqueezed": lambda route, i: route[..., i].unsqueeze(-1),
}


@pytest.mark.parametrize("way", list(ROUTES))
def test_route_weights(way: str) -> None:
    def layer(x: Tensor, weight: Tensor, logits: Tensor, route: Tensor) -> Tensor:
        weights = [ROUTES[way](route, i) for i in range(3)]
        return sum(r * gated(x, weight, straight_through(one)) for r, one in zip(weights, logits, strict=True))

    def named() -> dict[str, Tensor]:
        return layer_tensors(route=torch.linspace(-1, 2, 15, dtype=torch.float64).view(5, 3).requires_grad_())

    capture = Capture(strict=True)
    assert_same(results(capture.compile(layer), named()), results(layer, named()), SAME)
    assert capture.calls["mglu.forward_ste"] == 1
    assert masked_products(capture.calls) == 0


@pytest.mark.parametrize("shape", [(16,), (1, 16), (0, 16), (2, 3, 4, 16)])
def test_shapes_of_x(shape: tuple[int, ...]) -> None:
    model, x = NaiveMGLU(16, 12, n_masks=2, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    capture = Capture(strict=True)
    assert_same(model_results(model, x, capture.compile(model)), model_results(model, x), SAME)
    assert capture.calls["mglu.forward_ste"] == 1


@pytest.mark.parametrize("accumulated", [False, True])
def test_dynamic_tokens_fuse_in_one_graph(accumulated: bool) -> None:
    model = NaiveMGLU(16, 12, n_masks=2, dtype=torch.float64)

    def layer(x: Tensor) -> Tensor:
        if not accumulated:
            return model(x)
        y = x.new_zeros(*x.shape[:-1], 12)
        for logits in model.mask_logits:
            y += gated(x, model.weight, straight_through(logits))
        return y

    capture = Capture(strict=True)
    compiled = capture.compile(layer, dynamic=True)
    for tokens in (7, 2, 33):
        x = torch.randn(3, tokens, 16, dtype=torch.float64)
        assert relative_error(compiled(x), layer(x)) <= SAME
    assert len(capture.report.fused) == capture.report.graphs == 1


# --- Spellings ------------------------------------------------------------------------------------------------------

SPELLINGS = [
    *(Program(mask=name) for name in TRAINED),
    *(Program(complement=name) for name in COMPLEMENTS),
    *(Program(product=name) for name in PRODUCTS),
    *(Program(projection=name, total=total) for name, total in zip(PROJECTIONS, SUMS, strict=False)),
    *(Program(total=name) for name in SUMS),
    *(Program(value=name) for name in ("w - w * m", "t - gate")),
    Program(value_first=True),
    Program(swapped=True),
    *(Program(mask=name, complement="~m", kind="bool") for name in FIXED),
    *(Program(mask="slice", complement=name, kind="bool") for name in BOOL_COMPLEMENTS),
    *(
        Program(mask="slice", complement="~m", product=name, projection=projection, kind="bool")
        for name in BOOL_PRODUCTS
        for projection in ("linear", "x @ w.T")
    ),
    Program(mask="slice", complement="~m", value="t - gate", kind="bool"),
    Program(mask="slice", complement="~m", value="w - w * m", kind="bool"),
    Program(mask="slice", complement="m == 0", swapped=True, kind="bool"),
]


def spelling_name(program: Program) -> str:
    default = Program()
    return ", ".join(str(v) for k, v in vars(program).items() if v != getattr(default, k))


@pytest.mark.parametrize("program", SPELLINGS, ids=spelling_name)
def test_spelling(program: Program) -> None:
    capture = Capture(strict=True)
    found = results(capture.compile(program), tensors(program))
    assert_same(found, results(program, tensors(program)), SAME)
    counts = capture.calls
    assert masked_products(counts) == counts["silu"] == 0
    assert counts["mglu.forward_ste"] == program.trained
    assert packings(counts) == counts["mglu.forward"] == (not program.trained)
    assert len(capture.report.fused) == 1
    assert capture.report.missed == []


def test_hand_written_silu_and_inplace_activation() -> None:
    def by_hand(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        m = straight_through(logits[0])
        gate = F.linear(x, weight * m)
        return gate * torch.sigmoid(gate) * F.linear(x, weight * (1 - m))

    def in_place(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        m = straight_through(logits[0])
        gate, value = F.linear(x, weight * m), F.linear(x, weight * (1 - m))
        return F.silu(gate, inplace=True) * value

    for layer in (by_hand, in_place):
        capture = Capture(strict=True)
        found = results(capture.compile(layer), layer_tensors())
        assert_same(found, results(layer, layer_tensors()), SAME)
        assert capture.calls["mglu.forward_ste"] == 1
        assert [site.activation for site in capture.report.fused] == ["silu"]


def layer_tensors(**changed: Any) -> dict[str, Tensor]:
    named = tensors(Program())
    return {"x": named["x"], "weight": named["weight"], "logits": named["masks"]} | changed


def gated(x: Tensor, weight: Tensor, m: Tensor) -> Tensor:
    return F.silu(F.linear(x, weight * m)) * F.linear(x, weight * (1 - m))


@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("spelling", ["stored [h, d]", "transposed then masked", "where of transposed"])
def test_weight_stored_the_other_way(spelling: str, square: bool) -> None:
    """Masks lie as the tensor they multiply, also where a square weight lets no shape tell."""
    d, h = (8, 8) if square else (12, 8)

    def layer(x: Tensor, weight: Tensor, bits: Tensor) -> Tensor:
        if spelling == "where of transposed":
            return F.silu(x @ torch.where(bits, weight.t(), 0)) * (x @ torch.where(bits, 0, weight.t()))
        w = weight if spelling == "stored [h, d]" else weight.T
        return F.silu(x @ (w * bits)) * (x @ (w * ~bits))

    shape = (h, d) if spelling == "stored [h, d]" else (d, h)
    named = {"x": torch.randn(5, h), "weight": torch.randn(shape), "bits": torch.randn(h, d) > 0}
    named = {k: v.double().requires_grad_() if v.is_floating_point() else v for k, v in named.items()}
    capture = Capture(strict=True)
    found = results(capture.compile(layer), named)
    assert_same(found, results(layer, named), SAME)
    assert capture.calls["mglu.forward"] == 1
    assert masked_products(capture.calls) == 0


class Buffers(nn.Module):
    """Fixed masks as buffers, reached in four ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.randn(12, 16, dtype=torch.float64))
        masks = torch.rand(3, 12, 16) > 0.5
        self.register_buffer("stacked", masks)
        for i in range(3):
            self.register_buffer(f"mask{i}", masks[i].clone())

    def masks(self) -> Any:
        if self.way == "list":
            return [self.mask0, self.mask1, self.mask2]
        if self.way == "index":
            return [self.stacked[i] for i in range(3)]
        return self.stacked.unbind() if self.way == "unbind" else self.stacked

    def forward(self, x: Tensor) -> Tensor:
        return sum(F.silu(F.linear(x, self.weight * m)) * F.linear(x, self.weight * ~m) for m in self.masks())


@pytest.mark.parametrize("way", ["list", "iterated", "unbind", "index"])
def test_mask_buffers(way: str) -> None:
    model, x = Buffers(way), torch.randn(4, 16, dtype=torch.float64)
    capture = Capture(strict=True)
    assert_same(model_results(model, x, capture.compile(model)), model_results(model, x), SAME)
    # Slices of one tensor are packed as that tensor; masks of their own are stacked first.
    assert capture.calls == {"mglu.pack_masks": 1, "mglu.forward": 1} | ({"stack": 1} if way == "list" else {})


class LogitList(nn.Module):
    """Logits in a ParameterList, one a mask."""

    def __init__(self, n_masks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 16, dtype=torch.float64))
        self.logits = nn.ParameterList(torch.randn(12, 16, dtype=torch.float64) for _ in range(n_masks))

    def forward(self, x: Tensor) -> Tensor:
        y = None
        for logits in self.logits:
            term = gated(x, self.weight, straight_through(logits))
            y = term if y is None else y + term
        return y


@pytest.mark.parametrize("n_masks", [1, 3])
def test_a_parameter_a_mask(n_masks: int) -> None:
    model, x = LogitList(n_masks), torch.randn(4, 16, dtype=torch.float64)
    capture = Capture(strict=True)
    assert_same(model_results(model, x, capture.compile(model)), model_results(model, x), SAME)
    assert capture.calls["mglu.forward_ste"] == 1
    assert masked_products(capture.calls) == 0


def test_repeated_and_subset_masks() -> None:
    """A mask twice, and some of the stacked masks only: as many as the sum has."""

    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        masks = [straight_through(logits[i]) for i in (0, 2, 0)]
        return sum(gated(x, weight, m) for m in masks)

    capture = Capture(strict=True)
    found = results(capture.compile(layer), layer_tensors())
    assert_same(found, results(layer, layer_tensors()), SAME)
    assert [site.n_masks for site in capture.report.fused] == [3]


def test_a_mask_with_other_uses_stays() -> None:
    """A penalty on the masks gets its gradient beside the layer's."""

    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        m = straight_through(logits[0])
        return gated(x, weight, m), m.sum() * 0.1

    capture = Capture(strict=True)
    found = results(capture.compile(layer), layer_tensors())
    assert_same(found, results(layer, layer_tensors()), SAME)


def test_result_that_is_cast_or_copied() -> None:
    """The layer ends before a cast of its result, and is one site whether that is read too or not."""

    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        y = gated(x, weight, straight_through(logits[0]))
        return y.double(), y.clone(), y

    named = {name: t.detach().float().requires_grad_() for name, t in layer_tensors().items()}
    capture = Capture(strict=True)
    found = results(capture.compile(layer), named)
    assert_same(found, results(layer, named), 4 * BUDGET[torch.float32])
    assert len(capture.report.fused) == 1


def test_sixteen_bits_summed_in_float32() -> None:
    """Gate, value and sum widened to float32 and rounded once at the end."""

    def layer(x: Tensor, weight: Tensor, bits: Tensor) -> Tensor:
        y: Any = 0
        for m in bits:
            gate, value = F.linear(x, weight * m).float(), F.linear(x, weight * ~m).float()
            y = y + F.silu(gate) * value
        return y.to(x.dtype)

    torch.manual_seed(0)
    x, weight, bits = torch.randn(6, 16).bfloat16(), torch.randn(12, 16).bfloat16(), torch.rand(3, 12, 16) > 0.5
    capture = Capture(strict=True)
    found = capture.compile(layer)(x, weight, bits)
    oracle = layer(x.double(), weight.double(), bits)
    assert found.dtype == torch.bfloat16
    assert relative_error(found, oracle) <= BUDGET[torch.bfloat16]
    assert capture.calls["mglu.forward"] == 1


# --- Models ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, features: int, n_masks: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features, dtype=torch.float64)
        self.mlp = NaiveMGLU(features, features, n_masks=n_masks, dtype=torch.float64)
        self.out = nn.Linear(features, features, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.mlp(self.norm(x)))


class Stack(nn.Module):
    def __init__(self, depth: int = 3, *, checkpoint: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, i % 3 + 1) for i in range(depth))
        self.checkpoint = checkpoint

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.checkpoint else block(x)
        return x


@pytest.mark.parametrize("checkpoint", [False, True])
def test_layers_of_one_graph(checkpoint: bool) -> None:
    torch.manual_seed(3)
    model, x = Stack(checkpoint=checkpoint), torch.randn(2, 4, 8, dtype=torch.float64)
    capture = Capture(strict=True)
    assert_same(model_results(model, x, capture.compile(model)), model_results(model, x), SAME)
    assert capture.calls["mglu.forward_ste"] == 3
    assert masked_products(capture.calls) == 3, "the output projections"
    assert [site.n_masks for site in capture.report.fused] == [1, 2, 3]


def test_layers_whose_inputs_are_results() -> None:
    """Directly, with nothing between; the last also takes its mask from the one before."""

    def layers(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        y = gated(x, weight, straight_through(logits[0]))
        y = gated(y, weight, straight_through(logits[1]))
        m = (y.t() @ y) > 0
        return F.silu(F.linear(y, weight * m)) * F.linear(y, weight * ~m)

    capture = Capture(strict=True)
    found = results(capture.compile(layers), layer_tensors())
    assert_same(found, results(layers, layer_tensors()), SAME)
    assert [site.route for site in capture.report.fused] == ["forward_ste", "forward_ste", "forward"]


def test_shared_weight() -> None:
    """Two layers with one weight, and the weight in use outside."""

    def layers(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        first = gated(x, weight, straight_through(logits[0]))
        second = F.relu(F.linear(x, weight * straight_through(logits[1]))) * F.linear(
            x, weight * (1 - straight_through(logits[1]).detach())
        )
        return first + gated(x + 1, weight, straight_through(logits[2])) + F.linear(x, weight) + 0 * second.detach()

    capture = Capture()
    found = results(capture.compile(layers), layer_tensors())
    assert_same(found, results(layers, layer_tensors()), SAME)
    assert [site.route for site in capture.report.fused] == ["forward_ste", "forward_ste"]
    assert len(capture.report.missed) == 1


@pytest.mark.parametrize("trained", [("x", "logits"), ("logits",), ("x", "weight"), ("weight",), ("x",), ()])
def test_what_requires_a_gradient(trained: tuple[str, ...]) -> None:
    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        return sum(gated(x, weight, straight_through(one)) for one in logits)

    def named() -> dict[str, Tensor]:
        return {name: t.detach().requires_grad_(name in trained) for name, t in layer_tensors().items()}

    capture = Capture(strict=True)
    assert_same(results(capture.compile(layer), named()), results(layer, named()), SAME)
    route = "forward_ste" if "logits" in trained else "forward"
    assert [site.route for site in capture.report.fused] == [route]


def test_detached_masks_are_fixed_masks() -> None:
    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        return gated(x, weight, straight_through(logits[0]).detach())

    capture = Capture(strict=True)
    found = results(capture.compile(layer), layer_tensors())
    assert_same(found, results(layer, layer_tensors()), SAME)
    assert found["logits"] is None
    assert [site.route for site in capture.report.fused] == ["forward"]


@pytest.mark.parametrize("where", ["ambient", "inside"])
def test_autocast(where: str) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = NaiveMGLU(16, 12, n_masks=2)

        def forward(self, x: Tensor) -> Tensor:
            if where == "ambient":
                return self.layer(x)
            with torch.autocast("cpu", torch.bfloat16):
                return self.layer(x) * 2

    torch.manual_seed(4)
    model, x = Cast(), torch.randn(4, 16)
    oracle = model_results(copy.deepcopy(model.layer).double(), x.double())
    scale = 1 if where == "ambient" else 2
    capture = Capture(strict=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "ambient"):
        naive = model_results(model, x)
        fused = model_results(model, x, capture.compile(model))
    assert capture.calls["mglu.forward_ste"] == 1
    for name, wanted in oracle.items():
        key = name if name in ("x", "result 0") else f"layer.{name}"
        assert fused[key].dtype == naive[key].dtype
        bar = max(BUDGET[torch.bfloat16], NAIVE_FACTOR * relative_error(naive[key], scale * wanted))
        assert relative_error(fused[key], scale * wanted) <= bar, key
    assert [site.dtype for site in capture.report.fused] == ["bfloat16"]


@pytest.mark.parametrize("projection", [*PROJECTIONS, "stored [h, d]"])
@pytest.mark.parametrize("swapped", [False, True])
def test_assume_binary_fuses_real_masks(projection: str, swapped: bool) -> None:
    project = PROJECTIONS.get(projection, torch.matmul)

    def layer(x: Tensor, weight: Tensor, m: Tensor) -> Tensor:
        gate, value = project(x, weight * m), project(x, (1 - m) * weight)
        return F.silu(value) * gate if swapped else F.silu(gate) * value

    named = layer_tensors()
    del named["logits"]
    m = (torch.rand(8, 8, dtype=torch.float64) > 0.5).double()
    capture = Capture(strict=True, assume_binary=True)
    compiled = capture.compile(layer)
    assert_same(results(compiled, named | {"m": m}), results(layer, named | {"m": m}), SAME)
    assert capture.calls["mglu.forward"] == 1
    m[0, 0] = 2
    with pytest.raises(ValueError, match="must be binary"):
        compiled(**named, m=m)


# --- The report and what is left of the graph -----------------------------------------------------------------------


def test_report_names_modules_and_lines() -> None:
    model = Stack(depth=2)
    capture = Capture(strict=True)
    capture.compile(model)(torch.randn(2, 8, dtype=torch.float64))
    paths = [site.module_path for site in capture.report.fused]
    assert paths == ["blocks.0.mlp", "blocks.1.mlp"]
    for site in capture.report.fused:
        file, line = site.source.rsplit(":", 1)
        assert file.endswith("naive.py")
        with open(file) as source:
            assert "act(gate) * value" in source.readlines()[int(line) - 1]
        assert (site.dtype, site.route, site.reason) == ("float64", "forward_ste", None)
        assert "fused to mglu::forward_ste" in str(site)


def test_report_of_a_plain_function_names_its_line() -> None:
    program = Program()
    capture = Capture(strict=True)
    results(capture.compile(program), tensors(program))
    assert capture.report.fused[0].module_path == ""
    assert "spellings.py:" in capture.report.fused[0].source


def test_fusing_a_fused_graph_changes_nothing() -> None:
    capture = Capture(strict=True)
    compiled = capture.compile(NaiveMGLU(16, 12, n_masks=2))
    compiled(torch.randn(4, 16))
    before = str(capture.after[0])
    report = FusionReport()
    fuse_graph(capture.after[0], report)
    assert str(capture.after[0]) == before
    assert (report.fused, report.missed, report.graphs) == ([], [], 1)


def test_calls_with_keywords_are_read() -> None:
    """And numbers that are not finite: of any model, nothing to fuse, and nothing that stops its compilation."""

    def keywords(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        y = torch.clone(input=x) + torch.neg(input=x) + torch.detach(input=x)
        swapped, first = torch.transpose(input=weight, dim0=0, dim1=1), torch.unbind(input=logits)[0]
        scores = torch.where(logits[0] > 0, 0.0, -torch.inf) + (1 - (first > 0).double()) * -torch.inf
        return y + (swapped + first + scores.nan_to_num())[:5]

    capture = Capture()
    found = results(capture.compile(keywords), layer_tensors())
    assert_same(found, results(keywords, layer_tensors()), SAME)
    assert (capture.report.fused, capture.report.missed) == ([], [])


def test_long_sums_are_read() -> None:
    """A residual stream deeper than Python's stack."""
    graph = Graph()
    x = node = graph.placeholder("x")
    x.meta["example_value"] = torch.empty(2, 2)
    for _ in range(3000):
        node = graph.call_function(operator.add, (node, x))
        node.meta = x.meta
    graph.output(node)
    report = FusionReport()
    fuse_graph(graph, report)
    assert (report.fused, report.missed, report.graphs) == ([], [], 1)
