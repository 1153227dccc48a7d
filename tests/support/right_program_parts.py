"""Tables of the statements that right MGLU programs are made of (`right_programs`).

Each statement is one tensor operation. `{i}` is the number of a mask and `{l}` its logits.
"""

from __future__ import annotations

from dataclasses import dataclass

INPUTS: dict[str, tuple[str, ...]] = {
    "x": (),
    "cloned x": ("x = x0.clone()",),
    "tanh": ("x = torch.tanh(x0)",),
    "norm": ("norms = x0.norm(dim=-1, keepdim=True)", "x = x0 / norms"),
    "layer_norm": ("x = F.layer_norm(x0, (8,))",),
}

WEIGHTS: dict[str, tuple[str, ...]] = {
    "W": (),
    "cloned W": ("W = W0.clone()",),
    "transposed": ("Vt = V.t()", "W = Vt * 2"),
    "scaled": ("norms_of_W = W0.norm(dim=0)", "W = W0 / norms_of_W"),
    "product": ("W = W0 @ K",),
    "decoded": ("Wq = Q.to(x.dtype)", "s = S[:, None]", "W = Wq * s"),
    "unpacked": (
        "low = B & 15",
        "high = B >> 4",
        "pairs = torch.stack((low, high), -1)",
        "both = pairs.flatten(1)",
        "Wb = both.to(x.dtype)",
        "Wq = Wb - 8",
        "s = G.expand(8, 8)",
        "W = Wq * s",
    ),
}


@dataclass(frozen=True)
class Spelling:
    """The statements that make mask `m{i}` from the program's argument, and the statements for its complement."""

    given: str
    """The program's argument: `logits`, `bool`, `float` or `bytes` (8 masks in the bits of a uint8 tensor)."""
    lines: tuple[str, ...]
    complements: tuple[str, ...]


_BOOL = ("n{i} = ~m{i}", "n{i} = torch.logical_not(m{i})", "n{i} = m{i} == 0", "n{i} = m{i} ^ True")
_REAL = ("n{i} = 1 - m{i}", "n{i} = 1.0 - m{i}", "n{i} = torch.rsub(m{i}, 1)")
_INTEGER = ("n{i} = 1 - m{i}", "n{i} = m{i} ^ 1", "n{i} = m{i} == 0")


def _straight_through(*lines: str) -> Spelling:
    return Spelling("logits", lines, _REAL)


SPELLINGS: dict[str, Spelling] = {
    "bool": Spelling("bool", (), _BOOL),
    ">": Spelling("logits", ("m{i} = {l} > 0",), (*_BOOL, "n{i} = {l} <= 0")),
    ">=": Spelling("logits", ("m{i} = {l} >= 0.25",), (*_BOOL, "n{i} = {l} < 0.25")),
    "<": Spelling("logits", ("m{i} = {l} < 0",), (*_BOOL, "n{i} = {l} >= 0")),
    "<=": Spelling("logits", ("m{i} = {l} <= -0.5",), (*_BOOL, "n{i} = {l} > -0.5")),
    "float": Spelling("float", (), _REAL),
    "bytes": Spelling("bytes", ("p{i} = P >> {i}", "m{i} = p{i} & 1"), _INTEGER),
    "rounded": Spelling("logits", ("p{i} = torch.sigmoid({l})", "m{i} = torch.round(p{i})"), _REAL),
    "(hard - soft).detach() + soft": _straight_through(
        "c{i} = {l} > 0", "h{i} = c{i}.to({l}.dtype)", "s{i} = h{i} - {l}", "t{i} = s{i}.detach()", "m{i} = t{i} + {l}"
    ),
    "hard + soft - soft.detach()": _straight_through(
        "c{i} = {l} > 0", "h{i} = c{i}.to({l}.dtype)", "s{i} = h{i} + {l}", "t{i} = {l}.detach()", "m{i} = s{i} - t{i}"
    ),
    "round(sigmoid)": _straight_through(
        "p{i} = torch.sigmoid({l})",
        "h{i} = torch.round(p{i})",
        "s{i} = h{i} - p{i}",
        "t{i} = s{i}.detach()",
        "m{i} = t{i} + p{i}",
    ),
    "no_grad": _straight_through(
        "with torch.no_grad(): c{i} = {l} > 0",
        "with torch.no_grad(): h{i} = c{i}.to({l}.dtype)",
        "s{i} = h{i} + {l}",
        "t{i} = {l}.detach()",
        "m{i} = s{i} - t{i}",
    ),
    "difference under no_grad": _straight_through(
        "c{i} = {l} > 0",
        "h{i} = c{i}.to({l}.dtype)",
        "with torch.no_grad(): s{i} = h{i} - {l}",
        "m{i} = s{i} + {l}",
    ),
    ".data": _straight_through(
        "d{i} = {l}.data", "c{i} = d{i} > 0", "h{i} = c{i}.to(d{i}.dtype)", "s{i} = h{i} + {l}", "m{i} = s{i} - d{i}"
    ),
    "autograd.Function": _straight_through("m{i} = Sign.apply({l})"),
}

# `{a}` is the masked weight and `{m}` the mask or its complement.
PRODUCTS: dict[str, tuple[str, ...]] = {
    "W * m": ("{a} = W * {m}",),
    "m * W": ("{a} = {m} * W",),
    "torch.mul": ("{a} = torch.mul(W, {m})",),
    "clone().mul_": ("{a} = W.clone()", "{a}.mul_({m})"),
}
BOOL_PRODUCTS = PRODUCTS | {
    "where": ("{a} = torch.where({m}, W, 0)",),
    "W * m.double()": ("{a}d = {m}.double()", "{a} = W * {a}d"),
}

PROJECTIONS: dict[str, tuple[str, ...]] = {
    "linear": ("{g} = F.linear(x, {a})",),
    "x @ W.t()": ("{a}t = {a}.t()", "{g} = x @ {a}t"),
    "einsum": ("{g} = torch.einsum('bh,dh->bd', x, {a})",),
    "matmul": ("{a}t = {a}.mT", "{g} = torch.matmul(x, {a}t)"),
    "addmm": ("{a}t = {a}.t()", "{g}0 = x.new_zeros(8)", "{g} = torch.addmm({g}0, x, {a}t)"),
}

# Projections for experts, whose x, weight and masks have one more dimension.
PROJECTIONS_OF_EXPERTS: dict[str, tuple[str, ...]] = {
    "bmm": ("{a}t = {a}.mT", "{g} = torch.bmm(x, {a}t)"),
    "matmul": ("{a}t = {a}.transpose(-2, -1)", "{g} = x @ {a}t"),
    "einsum": ("{g} = torch.einsum('eth,edh->etd', x, {a})",),
}

# Gate and value from one product with both masked weights.
JOINTS: dict[str, tuple[str, ...]] = {
    "cat": ("j{i} = torch.cat([a{i}, b{i}])", "k{i} = F.linear(x, j{i})", "g{i}, v{i} = k{i}.chunk(2, -1)"),
    "stack": ("j{i} = torch.stack([a{i}, b{i}])", "k{i} = torch.einsum('bh,kdh->kbd', x, j{i})", "g{i}, v{i} = k{i}"),
    "unflatten": (
        "j{i} = torch.cat([a{i}, b{i}])",
        "k{i} = F.linear(x, j{i})",
        "o{i} = k{i}.unflatten(-1, (2, 8))",
        "g{i}, v{i} = o{i}.unbind(-2)",
    ),
}

ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "silu": ("z{i} = F.silu(g{i})",),
    "gelu": ("z{i} = F.gelu(g{i})",),
    "gelu_tanh": ("z{i} = F.gelu(g{i}, approximate='tanh')",),
    "relu": ("z{i} = F.relu(g{i})",),
    "sigmoid": ("z{i} = torch.sigmoid(g{i})",),
    "tanh": ("z{i} = torch.tanh(g{i})",),
    "g * sigmoid(g)": ("e{i} = torch.sigmoid(g{i})", "z{i} = g{i} * e{i}"),
    "g / (1 + exp(-g))": ("e{i} = torch.exp(-g{i})", "f{i} = 1 + e{i}", "z{i} = g{i} / f{i}"),
}

# Statements before all terms, after term i, and after all terms. `{terms}` stands for all terms.
SUMS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "y = y + term": (("y = torch.zeros(8, dtype=x.dtype)",), "y = y + y{i}", ()),
    "y += term": (("y = torch.zeros(x.shape[0], 8, dtype=x.dtype)",), "y += y{i}", ()),
    "stack().sum(0)": ((), "", ("Y = torch.stack([{terms}])", "y = Y.sum(0)")),
    "stack().mean(0)": ((), "", ("Y = torch.stack([{terms}])", "y = Y.mean(0)")),
    "a number": (("y = 0",), "y = y + 0.5 * y{i}", ()),
    "mask weights": (("R = torch.sigmoid(x)", "y = 0"), "y = y + R[:, {i} : {i} + 1] * y{i}", ()),
    "learned scalars": (("y = 0",), "y = y + V[0, {i}] * y{i}", ()),
    "residual": (("y = x * 1",), "y = y + y{i}", ()),
    "residual +=": (("y = x.clone()",), "y += y{i}", ()),
}

TAILS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "tanh": ("y = torch.tanh(y)",),
    "residual": ("y = y + x",),
    "tied weight": ("y = F.linear(y, W)",),
}
