"""For each of the four rules of compile_passes/README.md, programs that a pass without the rule would break.

Each program has eager's results and gradients (a missing gradient included), and leaves its inputs as eager does.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.config
import torch.nn.functional as F
from torch import Tensor

from tests.support.budgets import BUDGET, relative_error
from tests.support.families import family
from tests.support.programs.graphs import Capture, results
from tests.support.programs.spellings import from_source

SAME = 10 * BUDGET[torch.float64]
SIZE = 11  # all sizes are equal, so that shapes do not tell tensors apart


def tensors(*, training: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    named = {name: torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64) for name in ("x", "y", "w", "l")}
    named = {name: tensor.requires_grad_(training) for name, tensor in named.items()}
    return named | {"m": torch.rand(SIZE, SIZE, generator=generator) > 0.5}


def two(x: Tensor, y: Tensor, gate: Tensor, value: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(y, value)


def draw(x: Tensor) -> Tensor:
    return torch._standard_gamma(x.abs())


# Writes between gate and value to a tensor that the value reads. (`test_calls` tests what each call writes to.)
WRITES = (
    "x.add_(1)",
    "x.__ipow__(2)",
    "x[0] = 1",
    "x.t()[1:3].mul_(3)",
    "x.data.neg_()",
    "torch.add(x, 1, out=x)",
    "F.silu(x, inplace=True)",
    "torch._foreach_add_([torch.ones(2), x], 1.0)",
    "F.batch_norm(x.t().t(), x[0], x[1].abs(), training=True)",
    "w[0] = 1",
    "F.embedding(torch.arange(4), w, max_norm=0.1)",
    "m.__iand__(~m)",
    "m[0].fill_(True)",
)

# Programs, keyed by parts of the reasons for which they are refused in inference and in training; None if fused.
PROGRAMS: dict[tuple[str | None, str | None], tuple[str, ...]] = {
    # Rule 1: a value is its callable, its bound arguments, and the versions of its inputs.
    ("different inputs", "different inputs"): (
        "two(torch.add(x, y, alpha=2), torch.sub(x, y, alpha=2), w * m, w * ~m)",
        "two(x.chunk(3)[2], x.split(3)[2], w * m, w * ~m)",
        "two(draw(x), draw(x), w * m, w * ~m)",
        # Rule 2: `batch_norm` writes to its running statistics without saying so in its schema.
        "x = x.detach(); g = linear(x[0], w * m); "
        "torch.batch_norm(y, None, None, x[0], x[1].abs(), True, 0.1, 1e-5, False); silu(g) * linear(x[0], w * ~m)",
        # `dropout` in eval mode returns an alias.
        "x, w = x.detach().clone(), w.detach(); alias = dropout(x, 0.5, training=False); g = linear(x, w * m); "
        "alias.mul_(2); silu(g) * linear(x, w * ~m)",
    ),
    # The same numbers mean sizes for `expand` and repetitions for `repeat`.
    ("different weights", "different weights"): ("two(x, x, w[:1].expand(11, 11) * m, w[:1].repeat(11, 1) * ~m)",),
    ("two different masks", "two different masks"): (
        "a, b = where(m, l > 0, y > 0), m.where(l > 0, y > 0); gated(x, w, a, ~b)",
    ),
    (None, None): (
        "two(torch.clamp(x, min=0), x.clamp(0, None), w * m, w * ~m)",
        "x = draw(x); gated(x, w, m, ~m)",
        # The logits receive a gradient of zeros. With none, an optimizer with weight decay would leave them unchanged.
        "gated(x, w, sigmoid(l).round())",
        "gated(x, w, ste(l).round())",
        # Rule 2: one functional view
        "with torch.no_grad(): w.div_(w.norm()); gated(x, w, m, ~m)",
        "with torch.no_grad(): w = w.clone(); gated(x, w, m, ~m)",
        "a, b = torch.zeros(11).double(), torch.ones(11).double(); x = F.batch_norm(x, a, b, training=True); "
        "(gated(x, w, m, ~m), a, b)",
        "total = torch.zeros_like(x); total.add_(gated(x, w, m, ~m)); total.mul_(2); total + 1",
        # In inference the soft mask is unused, but its call decides which random numbers are drawn afterwards.
        "s = l * torch.bernoulli(torch.full_like(l, 0.5)); m = (l > 0).double() + s - s.detach(); "
        "(gated(x, w, m), torch.rand(3).double())",
        "with torch.no_grad(): v = y[:, :1]; gated(x, w, m, ~m) * v",
        "with torch.no_grad(): v = l.view(11, 11); gated(x, w, ste(v))",
        # The sum is almost 1, so `q == 1` is a mask of its own.
        "q = F.relu((torch.sign(l + 3) - l).detach() + l); gated(x, w, q == 1, q != 1)",
        # Rule 4: roles belong to a weight and a site.
        LOGITS_GATED_BY_THEMSELVES := "(gated(x, w, l > 0, ~(l > 0)), (l * sigmoid(l)).mean())",
    ),
    ("nothing proves", "nothing proves"): (
        "p = sigmoid(l.detach()); p.mul_(3.0); gated(x, w, p.round())",
        "d = (l > 0).double() - l; d.mul_(2.0); gated(x, w, d.detach() + l)",
    ),
    ("writes in place", "writes in place"): (
        *(
            f"x, w = x.detach(), w.detach(); g = linear(x, w * m); {write}; silu(g) * linear(x, w * ~m)"
            for write in WRITES
        ),
        "trained = m.double() + l - l.detach(); m.logical_not_(); gated(x, w, trained)",
    ),
    # A sum that is added to itself has twice as many terms, of which the pass reads a limited number.
    ("takes at most 16", "takes at most 16"): ("y = gated(x, w, m, ~m)" + "; y = y + y" * 24 + "; y",),
    # Rule 3: a view that is made under `no_grad` requires a gradient, but passes none on.
    (None, "nothing proves"): (
        "m = ste(l); with torch.no_grad(): m = m.t().t(); gated(x, w, m)",
        # The gradient of `clamp` is 0 where rounding errors make the sum larger than 1.
        "m = (((l > -0.5).double() - l).detach() + l).clamp(0, 1); gated(x, w, m)",
        "m = ((l > 0).double() + l - l.detach()).clamp(0, 1); gated(x, w, m)",
    ),
    (None, "different inputs"): ("with torch.no_grad(): v = x.view(11, 11); two(v, x.view(11, 11), w * m, w * ~m)",),
    (None, "different weights"): ("with torch.no_grad(): v = w.view(11, 11); two(x, x, v * m, w.view(11, 11) * ~m)",),
    (None, "which backward needs"): (
        "y = gated(x, w, m, ~m); with torch.no_grad(): w.div_(w.norm()); y",
        # Autograd does not see this write, so eager's backward reads the new values.
        "m = ste(l); y = gated(x, w, m); m.data.mul_(0.5); y",
    ),
    # Tracing records only the final state of a tensor, and in its final state y requires no gradient.
    ("such as detach_", "such as detach_"): ("y = gated(x, w, m, ~m); later = y + 1; y.detach_(); later",),
    # The shape of a tensor before `t_` is unknown, even if a write to the tensor is a function of its old value.
    ("does not know", "does not know"): ("g = w.clone(); g.mul_(m); g.t_(); g.t_(); of_weights(x, g, w * ~m)",),
    # Tracing records only the final shape of a tensor, so the shape that the layer reads is unknown.
    ("the shape of `x` is unknown, or a call such as t_", "the shape of `x` is unknown, or a call such as t_"): (
        "x, w = x.detach().clone(), w.detach(); y = gated(x, w, m, ~m); x.transpose_(0, 1); (y, x)",
        "x, w = x.detach().clone(), w.detach(); y = gated(x, w, m, ~m); x.unsqueeze_(0); (y, x)",
    ),
}


REASONS = {source: reasons for reasons, sources in PROGRAMS.items() for source in sources}


@pytest.mark.parametrize(("source", "training"), family(REASONS, [False, True], one_in=1))
def test_program(source: str, training: bool) -> None:
    reason = REASONS[source][training]
    function = from_source("x, y, w, l, m", source, globals())
    given, compiled = tensors(training=training), tensors(training=training)
    capture = Capture(assume_binary=source == LOGITS_GATED_BY_THEMSELVES)
    with torch.set_grad_enabled(training):
        torch.manual_seed(0)
        wanted = results(function, given)
        torch.manual_seed(0)
        found = results(capture.compile(function), compiled)
    for key in wanted:
        _assert_equal(found[key], wanted[key], key)
    for key in given:
        _assert_equal(compiled[key].detach(), given[key].detach(), f"{key} afterwards")
    assert [bool(capture.report.fused), bool(capture.report.missed)] == [reason is None, reason is not None]
    assert reason is None or reason in capture.reasons[0], capture.reasons


def _assert_equal(found: Tensor | None, wanted: Tensor | None, what: str) -> None:
    assert (found is None) == (wanted is None), f"{what}: a gradient on one side only"
    if found is not None and wanted is not None:
        same = torch.equal(found, wanted) if wanted.dtype is torch.bool else relative_error(found, wanted) <= SAME
        assert same, f"{what}: other values"


@pytest.mark.parametrize("compiled_autograd", [False, True])
@pytest.mark.parametrize("hooked", ["m", "total", "g"])
def test_a_gradient_hook_inside_of_a_layer_refuses_it(hooked: str, compiled_autograd: bool) -> None:
    """Rule 3: nodes that a rule looks through are part of the site.

    With the operator, the hook on such a node would see another gradient, or none. Newer versions of torch record every
    hook in the graph.
    """
    named = {name: t for name, t in tensors(training=True).items() if name in ("x", "w", "l")}
    layer = "total = (l > 0).double() + l; m = total - l.detach(); g = w * m; y = of_weights(x, g, w * (1 - m))"
    hook = f"{hooked}.register_hook(lambda grad: grad * 0.1)"
    function, capture = from_source("x, w, l", f"{layer}; {hook}; y", {}), Capture()
    with torch._dynamo.config.patch(compiled_autograd=compiled_autograd):
        found = results(capture.compile(function), named)
    wanted = results(function, named)
    for key in wanted:
        _assert_equal(found[key], wanted[key], key)
    assert capture.report.fused == []
    assert capture.reasons


def test_a_fill_outside_of_a_layer_stays_unchanged() -> None:
    def function(x: Tensor, m: Tensor) -> Tensor:
        copy = x.clone()
        copy[m] = 1e5
        return copy * 2

    named = tensors(training=False)
    capture = Capture()
    compiled = capture.compile(function)
    half = named["x"].half()
    try:
        wanted = function(half, named["m"])
    except RuntimeError:  # torch 2.15 rejects the number
        with pytest.raises(RuntimeError, match="without overflow"):
            compiled(half, named["m"])
        return
    assert torch.equal(compiled(half, named["m"]), wanted)
    assert list(map(str, capture.after)) == list(map(str, capture.before))


def test_a_weight_that_is_filled_with_zeros_gives_zeros() -> None:
    """The pass evaluates `zeros.mul_(mask)`, which writes to its operand, at both values of the mask."""
    source = "w = w * 2; w.zero_(); g, v = w.clone(), w.clone(); g.mul_(m); v.mul_(~m); of_weights(x, g, v)"
    named = tensors(training=False)
    compiled = Capture().compile(from_source("x, w, m", source, {}))
    assert torch.equal(compiled(named["x"], named["w"], named["m"]), torch.zeros(SIZE, SIZE, dtype=torch.float64))


def test_inputs_that_share_memory() -> None:
    """One input of the program is a view of another."""
    function = from_source("x, view, w, m", "g = linear(x, w * m); view.add_(1); silu(g) * linear(x, w * ~m)", {})

    def named() -> dict[str, Tensor]:
        given = tensors(training=False)
        return {"x": given["x"], "view": given["x"][1:3], "w": given["w"], "m": given["m"]}

    capture = Capture()
    _assert_equal(capture.compile(function)(**named()), function(**named()), "result")
    assert capture.report.fused == []
