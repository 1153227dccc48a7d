"""Programs that depend on properties of a value besides its elements: strides, exact dtype, and position in the graph.

Each program must have eager's results, strides, shared memory and gradients, and leave its inputs as eager does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.families import family
from tests.support.programs.graphs import Capture
from tests.support.programs.source_programs import SourceProgram, through_the_pass

SIZE = 8
LAYER = "y = F.silu(F.linear(x, a)) * F.linear(x, b)"


@dataclass(frozen=True)
class Lines(SourceProgram):
    """A program of x `[8, 8]`, W `[8, 8]`, a bool mask M, logits L, integers P, a vector v and indices i."""

    training: bool = False
    dtype: torch.dtype = torch.float64
    traces = True

    @property
    def arguments(self) -> list[str]:
        return ["x", "W", "M", "L", "P", "v", "i"]

    @property
    def returned(self) -> tuple[str, ...]:
        return tuple(self.statements[-1].split(", "))

    @property
    def source(self) -> str:
        lines = [*self.statements[:-1], f"return ({self.statements[-1]},)"]
        return f"def program({', '.join(self.arguments)}):\n" + "".join(f"    {line}\n" for line in lines)

    def inputs(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(0)
        x, w, logits = torch.randn(3, SIZE, SIZE, generator=generator, dtype=torch.float64)
        real = {"x": x.to(self.dtype), "W": w.to(self.dtype), "L": logits, "v": w[0].to(self.dtype)}
        bits = torch.randint(-(2**62), 2**62, (SIZE, SIZE), generator=generator)
        given = {name: t.clone().requires_grad_(self.training) for name, t in real.items()}
        return {**given, "M": logits.flip(0) > 0, "P": bits, "i": torch.tensor([1, 5, 7, 30, 63])}

    def surroundings(self) -> AbstractContextManager[Any]:
        return torch.set_grad_enabled(self.training)


def program(source: str, *, training: bool = False, dtype: torch.dtype = torch.float64) -> Lines:
    return Lines(0, tuple(source.split("; ")), training, dtype)


MASKED = "a, b = W * M, W * ~M"
# The strides of a layer's result y decide if z is a view or a copy of y, and so if the write to z changes y.
STRIDES = (
    f"{MASKED}; {LAYER}; y = y + x.t(); z = y.flatten(); z.mul_(2); y, z",
    f"{MASKED}; {LAYER}; y = x.t() + y; z = y.flatten(); z.mul_(2); y, z",
    f"{MASKED}; y = torch.zeros_like(x.t()); t = F.silu(F.linear(x, a)) * F.linear(x, b); y = y + t; "
    "z = y.contiguous(); z.mul_(2); y, z",
    f"{MASKED}; y = F.silu(a @ x.T) * (b @ x.T); z = y.T.reshape(-1); z.mul_(2); y, z",
    f"{MASKED}; y = x.t() * 1; s, t = (F.silu(F.linear(x, c)) * F.linear(x, d) for c, d in ((a, b), (b, a))); "
    "y = y + s; y = y + t; z = y.flatten(); z.mul_(2); y, z",
)


@pytest.mark.parametrize("source", STRIDES)
def test_a_layer_keeps_the_strides_of_its_result(source: str) -> None:
    assert through_the_pass(program(source)) == "fused"


FUSED = (
    f"{MASKED}; {LAYER}; z = 0.5 * y; y, z",
    # Numbers
    "a, b = W * (P > 2**53), W * (P <= 2**53); y = F.silu(F.linear(x, a)) * F.linear(x, b); y",
    "m = ((P & 2**40) / 2**40).double(); a, b = W * m, W * (1 - m); y = F.silu(F.linear(x, a)) * F.linear(x, b); y",
    # Spellings
    f"a, b = W * M * 0.5, W * ~M * 0.5; {LAYER}; y",
    f"a, b = W * M / 0.9, W * ~M / 0.9; {LAYER}; y",
    f"a, b = W * M * v[:, None], W * ~M * v[:, None]; {LAYER}; y",
    f"a, b = W * M * v[0], v[0] * (W * ~M); {LAYER}; y",
    f"a, b = W * M / (v[0] + 9), W * ~M / (v[0] + 9); {LAYER}; y",
    f"s = torch.where(M, 1.0, -1.0).double(); a, b = 0.5 * (W + W * s), 0.5 * (W - W * s); {LAYER}; y",
    f"m = torch.round(torch.clamp(L.detach(), 0, 1)); a, b = W * m, W * (1 - m); {LAYER}; y",
    f"m = torch.floor(torch.sigmoid(L.detach()) + 0.5); a, b = W * m, W * (1 - m); {LAYER}; y",
    f"m = torch.ceil(torch.clamp(L.detach(), -0.5, 1)); a, b = W * m, W * (1 - m); {LAYER}; y",
    f"m = torch.zeros(64).double().index_fill(0, i, 1).view(8, 8); a, b = W * m, W * (1 - m); {LAYER}; y",
    f"m = torch.zeros(64).double(); m[i] = 1; m = m.view(8, 8); a, b = W * m, W * (1 - m); {LAYER}; y",
    f"m = torch.zeros(64, dtype=torch.bool); m[i] = True; m = m.view(8, 8); a, b = W * m, W * ~m; {LAYER}; y",
    f"m = F.gumbel_softmax(torch.stack([L, -L], -1), hard=True)[..., 0]; a, b = W * m, W * (1 - m); {LAYER}; y",
    f"a, b = W.to(W.dtype) * M, W * ~M; {LAYER}; y",
    f"{MASKED}; y = F.silu(torch.linalg.matmul(x, a.T)) * torch.linalg.matmul(x, b.T); y",
    f"{MASKED}; p, q = torch.einsum('...h,ndh->...nd', x, torch.stack([a, b])).unbind(-2); y = F.silu(p) * q; y",
    f"{MASKED}; y = (F.silu(a @ x.T) * (b @ x.T)).T; y",
    f"{MASKED}; t = x.cos(); y = F.silu(a @ t) * (b @ t); y",
    f"{MASKED}; p = F.linear(x, torch.stack([a, b], 1).flatten(0, 1)); y = F.silu(p[..., ::2]) * p[..., 1::2]; y",
    f"{MASKED}; r = x.view(2, 4, 8); g = F.linear(r.view(-1, 8), a).view(2, 4, 8); y = F.silu(g) * F.linear(r, b); y",
    f"{MASKED}; r = x.view(2, 4, 8); g = F.silu(F.linear(r.flatten(0, 1), a)); y = g.view(2, 4, 8) * F.linear(r, b); y",
    f"{MASKED}; r = x.view(2, 4, 8); e = '...h,dh->...d'; y = F.silu(torch.einsum(e, r, a)) * torch.einsum(e, r, b); y",
    # The soft part of a straight-through mask is itself a sum, or the difference has a user of its own.
    f"s = L - 0.1; m = ((s > 0).double() - s).detach() + s; a, b = W * m, W * (1 - m); {LAYER}; y",
    f"s = L - 0.1; m = ((s > 0).double() - s).detach() + s; a, b = W * m, W * (1 - m); {LAYER}; y",
    f"s = -L; m = (s > 0).double() - s.detach() + s; a, b = W * m, W * (1 - m); {LAYER}; y",
    f"s = L + L.mean(); m = torch.sigmoid(s).round().detach() + s - s.detach(); a, b = W * m, W * (1 - m); {LAYER}; y",
    f"d = (L > 0).double() - L; m = d.detach() + L; z = d.sum(); a, b = W * m, W * (1 - m); {LAYER}; y, z",
    f"d = (L > 0).double() - L; m = d.detach() + L; z = d.sum(); a, b = W * m, W * (1 - m); {LAYER}; y, z",
    # The weight is pruned by another mask.
    f"w = W * (P > 3); a, b = w * M, w * ~M; {LAYER}; y",
    f"w = torch.where(P > 3, W, 0.0); a, b = w * M, w - w * M; {LAYER}; y",
    f"a, b = W * (L > 0).double() * M, W * (L > 0).double() * ~M; {LAYER}; y",
    f"w = W * (P > 3); a, b = torch.where(M, w, 0.0), torch.where(M, 0.0, w); {LAYER}; y",
    f"w = W * (P > 3); a, b = w.masked_fill(~M, 0), w.masked_fill(M, 0); {LAYER}; y",
    "w = W * (P > 3); g = F.linear(x, w * M); y = F.silu(g) * (F.linear(x, w) - g); y",
    # The weight `W * s` is computed for one product, and follows from the other.
    f"s = v[:, None]; a, b = W * M * s, W * s * ~M; {LAYER}; y",
    # Backward does not read x if neither the weight nor the masks have a gradient.
    "h, w = x * 1, W.detach(); h += F.silu(F.linear(h, w * M)) * F.linear(h, w * ~M); h",
    f"h, w = x * 1, W.detach(); a, b = w * M, w * ~M; {LAYER.replace('(x,', '(h.view(8, 8),')}; h.mul_(2); y, h",
    # `7 % m` raises an error where m is 0, so the pass cannot evaluate it for a mask m.
    f"{MASKED}; {LAYER}; z = 7 % (P != 0).long(); y, z",
)


@pytest.mark.parametrize(("source", "training"), family(FUSED, [True, False], one_in=2))
def test_program_that_is_fused(source: str, training: bool) -> None:
    assert through_the_pass(program(source, training=training)) == "fused"


NO_LAYERS = (
    f"m = M.float().view(torch.int32); a, b = W * m, W * (1 - m); {LAYER}; y",
    f"m = M.int().view(torch.float32).double(); a, b = W * m, W * (1 - m); {LAYER}; y",
    f"m = ((P & (2**54 - 1)) / 2**54).double(); a, b = W * m, W * (1 - m); {LAYER}; y",
    f"m, n = (v > torch.zeros(8, 8)).t(), (v > 0).t(); a, b = W * m, W * ~n; {LAYER}; y",
    f"j = P % 4 + 2**53 - 1; a, b = W * (j > 2**53), W * (j <= 2**53 + 1); {LAYER}; y",
    f"j = P % 4 + 2**53 - 1; a, b = W * (j > 2**53 + 1), W * (j <= 2.0**53); {LAYER}; y",
    f"m = (P & 255).to(torch.uint8); m[0] = 256 - 255; a, b = W * m, W * (1 - m); {LAYER}; y",
    f"m = torch.round(torch.clamp(L.detach(), 0, 2)); a, b = W * m, W * (1 - m); {LAYER}; y",
    f"m = torch.round(torch.clamp(L.detach(), -1, 1)); a, b = W * m, W * (1 - m); {LAYER}; y",
    f"{MASKED}; r = x.detach().view(torch.int64).view(torch.float64); "
    "g, h = (F.linear(r, c).view(8, 8) for c in (a, b)); y = F.silu(g) * h; y",
    f"t = L.detach().clamp(-1, 1); m = torch.round(t * t * 2 - 1); a, b = W * m, W * (1 - m); {LAYER}; y",
    f"m = torch.round((1 / L.detach().clamp(-1, 1) + 1) / 2); a, b = W * m, W * (1 - m); {LAYER}; y",
    f"p = P.to(torch.uint8); a, b = W * (p > 300), W * (p <= 400); {LAYER}; y",
    f"m = torch.zeros(64).double(); m[i] = 2; m = m.view(8, 8); a, b = W * m, W * (1 - m); {LAYER}; y",
    f"m = F.gumbel_softmax(torch.stack([L, -L], -1), hard=True)[..., 0]; a, b = W * m, W * (m < 1); {LAYER}; y",
    f"{MASKED}; p = F.linear(x, torch.stack([a, b], 1).flatten(0, 1)); y = F.silu(p[..., 0::2]) * p[..., 0::2]; y",
    f"{MASKED}; p = F.linear(x, torch.stack([a.T, b.T], 1).flatten(0, 1)); y = F.silu(p[..., ::2]) * p[..., 1::2]; y",
    f"{MASKED}; y = F.silu(a @ x.T) * (x @ b.T); y",
    f"{MASKED}; y = F.silu(v[:, None] * (a @ x.T)) * (b @ x.T); y",
    f"a, b = W * M * 0.5, W * ~M; {LAYER}; y",
    f"a, b = W * M * v[:, None], W * ~M; {LAYER}; y",
    f"{MASKED}; a, b = torch.stack([a] * 8), torch.stack([b] * 8); e = '...h,...dh->...d'; "
    "y = torch.einsum(e, x, a) * torch.einsum(e, x, b); y",
)


@pytest.mark.parametrize(("source", "training"), family(NO_LAYERS, [True, False], one_in=2))
def test_program_that_is_no_layer(source: str, training: bool) -> None:
    assert through_the_pass(program(source, training=training)) in ("refused", "silent")


FACTORS_IN_FLOAT16 = (
    f"{MASKED}; y = F.silu(F.linear(x, a)) * (F.linear(x, b) * 0.01); y",
    f"{MASKED}; y = (1000 * F.linear(x, a)) * (1000 * F.linear(x, b)); y",
    f"{MASKED}; y = (v[:1] * F.silu(F.linear(x, a))) * F.linear(x, b); y",
    f"{MASKED}; s = F.silu(F.linear(x, a)) * F.linear(x, b); t = F.silu(F.linear(x, b)) * F.linear(x, a); "
    "y = torch.stack([s, t]).mean(0); y",
)


@pytest.mark.parametrize("source", FACTORS_IN_FLOAT16)
def test_factors_inside_of_a_layer_in_float16_stay_where_they_are(source: str) -> None:
    """A factor that is moved behind the operator would come too late: a value may have overflowed or become 0."""
    assert through_the_pass(program(source, dtype=torch.float32)) == "fused"
    half = program(source, dtype=torch.float16)
    capture = Capture()
    with torch.no_grad():
        capture.compile(half.function())(**half.inputs())
    parts_alone = "mean" in source  # the terms alone have no factor, so each is fused
    assert len(capture.report.fused) == 2 * parts_alone
    assert [("in float16" in reason) for reason in capture.reasons] == [True] * (not parts_alone)


def test_a_factor_of_the_whole_layer_in_float16_is_multiplied_where_the_program_does() -> None:
    source = f"{MASKED}; {LAYER}; y = 0.01 * y; y"
    assert through_the_pass(program(source, dtype=torch.float16)) == "fused"


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex128])
def test_a_dtype_that_the_operator_does_not_take_is_refused(dtype: torch.dtype) -> None:
    """The operator is not run to find out, since torch logs an error that fake tensors raise."""

    def function(x: Any, weight: Any, m: Any) -> Any:
        return torch.mm(x, (weight * m).T) * torch.mm(x, (weight * ~m).T)

    given = [torch.arange(64).view(8, 8).to(dtype), torch.arange(64).view(8, 8).to(dtype), torch.eye(8) > 0]
    capture = Capture()
    assert torch.equal(capture.compile(function)(*given), function(*given))
    assert f"the result is {dtype}; the operator takes float16, bfloat16" in capture.reasons[0]


@pytest.mark.parametrize("region", ["inference_mode", "enable_grad", "no_grad"])
@pytest.mark.parametrize("training", [True, False])
def test_a_layer_in_a_region_is_fused_without_what_follows_it(region: str, training: bool) -> None:
    lines = LAYER.replace("x, a", "x, W * M").replace("x, b", "x, W * ~M")
    source = program(f"with torch.{region}(): {lines}; z = y * 0.5; z", training=training)
    capture = Capture()
    with torch.set_grad_enabled(training):
        found, wanted = (
            function(**source.inputs()) for function in (capture.compile(source.function()), source.function())
        )
    torch.testing.assert_close(found[0].detach().clone(), wanted[0].detach().clone())
    assert [len(capture.report.fused), capture.reasons] == [1, []]


def test_a_square_weight_and_its_transpose_are_two_layers() -> None:
    """Only the layouts of the products show that the gate multiplies the weight, and the value its transpose."""

    def function(x: Any, weight: Any, m: Any) -> Any:
        return torch.nn.functional.silu(torch.nn.functional.linear(x, weight * m)) * (x @ (weight * (1 - m)))

    given = [torch.randn(3, 8), torch.randn(8, 8), (torch.rand(8, 8) > 0.5).float()]
    capture = Capture(assume_binary=True)
    torch.testing.assert_close(capture.compile(function)(*given), function(*given))
    assert not capture.report.fused


def test_a_view_that_cannot_be_made_in_inference_mode_refuses_a_layer() -> None:
    """The operator needs a transposed view of an outside weight, which AOTAutograd cannot make in inference mode."""

    def function(x: Any, weight: Any, m: Any) -> Any:
        with torch.inference_mode():
            return torch.nn.functional.silu(x @ (weight * m)) * (x @ (weight * ~m))

    capture = Capture()
    capture.compile(function)(torch.randn(3, 8), torch.randn(8, 8), torch.rand(8, 8) > 0.5)
    assert "the operator cannot run in the place of" in capture.reasons[0]


def test_writes_after_enable_grad_in_no_grad() -> None:
    """The layer records gradients, although grad mode is off around it, and the write changes what backward needs."""
    lines = LAYER.replace("x, a", "x, W * M").replace("x, b", "x, W * ~M")

    def function(x: Any, weight: Any, m: Any) -> Any:
        with torch.enable_grad():
            y = torch.nn.functional.silu(x @ (weight * m).T) * (x @ (weight * ~m).T)
        weight.mul_(0.5)
        return y

    given = program(f"{lines}; y", training=True).inputs()
    capture = Capture()
    with torch.no_grad():
        capture.compile(function)(given["x"], given["W"], given["M"])
    assert "which backward needs" in capture.reasons[0]


def test_writes_after_a_checkpoint_refuse_the_layer_in_its_body() -> None:
    def function(x: Any, weight: Any, m: Any) -> Any:
        def body(x: Any) -> Any:
            return torch.nn.functional.silu(x @ (weight * m).T) * (x @ (weight * ~m).T)

        y = torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)
        with torch.no_grad():
            weight.clamp_(-0.1, 0.1)
        return y

    given = program(f"{LAYER}; y", training=True).inputs()
    capture = Capture()
    capture.compile(function)(given["x"], given["W"].detach().clone().requires_grad_(), given["M"])
    assert "the graph around this one writes in place to `l_weight_`, which backward needs" in capture.reasons[0]


def test_the_reason_names_the_node_that_writes_to_a_part_of_the_result() -> None:
    def function(x: Any, weight: Any, m: Any) -> Any:
        y = torch.tanh(x @ (weight * m).T) * (x @ (weight * ~m).T)
        y[0].zero_()
        return y

    given = program(f"{LAYER}; y", training=False).inputs()
    capture = Capture()
    capture.compile(function)(given["x"], given["W"], given["M"])
    assert "`zero_` writes in place to the memory of `y`" in capture.reasons[0]


def test_a_gradient_penalty_in_the_graph_is_refused() -> None:
    def function(x: Any, weight: Any, m: Any) -> Any:
        h = x * 1.5
        y = torch.tanh(h @ (weight * m).T) * (h @ (weight * ~m).T)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return gradient.square().sum() + y.sum()

    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        pytest.skip("this torch does not trace torch.autograd.grad")
    given = program(f"{LAYER}; y", training=True).inputs()
    capture = Capture()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        capture.compile(function)(given["x"], given["W"], given["M"]).backward()
    assert "no second" in capture.reasons[0]


def test_rounding_errors_in_a_function_of_autograd() -> None:
    """`hard + soft - soft` has rounding errors, also as the result of a custom function."""

    class Mask(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Any) -> Any:
            return (logits > 0).to(logits.dtype) + logits - logits

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad

    def function(x: Any, weight: Any, logits: Any) -> Any:
        m = Mask.apply(logits).detach()
        return torch.nn.functional.silu(x @ (weight * m).T) * (x @ (weight * (m < 1)).T)

    given = program(f"{LAYER}; y", training=True).inputs()
    capture = Capture()
    found = capture.compile(function)(given["x"], given["W"], given["L"])
    assert torch.equal(found, function(given["x"], given["W"], given["L"]))
    assert capture.report.fused == []


def test_a_chain_of_unknown_calls_takes_linear_time() -> None:
    """To find where storages were joined, the pass need not visit all storages."""
    from benchmarks.compile_time import captured, time_of_pass, unknown_calls

    times = []
    for length in (100, 1000):
        function, x = unknown_calls(length).build()
        with torch.no_grad():
            graph = captured(function, x)
        times.append(min(time_of_pass(graph, 0, may_report=True) for _ in range(3)) / length)
    assert times[1] <= 2 * times[0]
