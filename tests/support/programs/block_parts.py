"""Tables of parts, from which `blocks` makes whole blocks. A part is one or a few lines of source.

`{i}` is the number of a mask and `{l}` its logits. `x`, `W` and `y` are the input, weight and result of a layer; the
second layer of a block has other names for them. The first part of a table is the usual one. Some blocks of these parts
are not MGLU layers. If the parts of a block do not fit together, eager torch raises an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.programs import perturbations as perturbation_tables
from tests.support.programs import right_programs as right
from tests.support.programs.right_programs import Spelling

Lines = tuple[str, ...]

DTYPES: dict[str, int] = {"float64": 9, "float32": 6, "float16": 6, "bfloat16": 3, "int64": 1, "complex128": 1}
"""The dtypes of x and the weights, with their relative frequencies."""

MAGNITUDES = {"1": 1.0, "0.001": 1e-3, "200": 200.0}
"""Factors for x."""

SURROUNDINGS: dict[str, Lines] = {
    "nothing": (),
    "no_grad": ("torch.no_grad()",),
    "inference_mode": ("torch.inference_mode()",),
    "autocast": ("torch.autocast('cpu', torch.bfloat16)",),
    "enable_grad": ("torch.enable_grad()",),
}
"""The contexts in which a program is compiled and called."""

CHECKPOINT = "checkpoint"
REGIONS: dict[str, Lines] = {
    "no_grad": ("with torch.no_grad():",),
    "set_grad_enabled": ("with torch.set_grad_enabled(False):",),
    "enable_grad in no_grad": ("with torch.no_grad():", "with torch.enable_grad():"),
    "enable_grad": ("with torch.enable_grad():",),
    "inference_mode": ("with torch.inference_mode():",),
    "inference_mode(False)": ("with torch.inference_mode(False):",),
    "autocast to bfloat16": ("with torch.autocast('cpu', torch.bfloat16):",),
    "autocast to float16": ("with torch.autocast('cpu', torch.float16):",),
    "no autocast": ("with torch.autocast('cpu', enabled=False):",),
    "checkpoint": (CHECKPOINT,),
    "checkpoint in autocast": ("with torch.autocast('cpu', torch.bfloat16):", CHECKPOINT),
    "autocast in checkpoint": (CHECKPOINT, "with torch.autocast('cpu', torch.bfloat16):"),
    "checkpoint in no_grad": ("with torch.no_grad():", CHECKPOINT),
}
"""Statements that enclose lines of a layer. With `CHECKPOINT`, the lines become a function that `checkpoint` calls."""

# --- Inputs and weights ----------------------------------------------------------------------------------------------

INPUTS: dict[str, Lines] = right.INPUTS | {
    "batch": ("x = X * 1",),
    "time-major": ("x = X.transpose(0, 1)",),
    "strided": ("x = x1[..., ::2]",),
    "sliced": ("x = x1[..., 4:12]",),
    "columns": ("x = x0.mT.contiguous().mT",),
    "square columns": ("x = K.mT",),
    "expanded": ("x = x0[:1].expand(8, *x0.shape[1:])",),
    "vector": ("x = x0[0]",),
    "no tokens": ("x = x0[..., :0, :]",),
}

WEIGHTS: dict[str, Lines] = {
    "W": (),
    "cloned W": ("W = W0.clone()",),
    "transposed": ("W = V.mT",),
    "scaled": ("norms_of_W = W0.norm(dim=-2, keepdim=True)", "W = W0 / norms_of_W"),
    "product": ("W = W0 @ K",),
    "strided": ("W = W1[..., ::2]",),
    "sliced": ("W = W1[..., :8]",),
    "rounded": ("W16 = W0.bfloat16()", "W = W16.to(x.dtype)"),
    "expanded": ("W = W0[..., :1, :].expand(W0.shape)",),
}

# --- Masks -----------------------------------------------------------------------------------------------------------

_NOT, _REAL, _INT = ("n{i} = ~m{i}",), ("n{i} = 1 - m{i}",), ("n{i} = 1 - m{i}", "n{i} = (m{i} == 0)")


def _logits(lines: str, *complements: str) -> Spelling:
    return Spelling("logits", tuple(lines.split("; ")), complements or _REAL)


def _bool(lines: str, *complements: str) -> Spelling:
    return Spelling("bool", tuple(lines.split("; ")), complements or _REAL)


TRICKY_MASKS: dict[str, Spelling] = {
    # Masks with mistaken shapes raise no error here, because r is `[8]` and all other sizes are 8.
    "broadcast in a comparison": _logits("o = torch.zeros(8, 8); m{i} = r > o", "n{i} = r <= 0", "n{i} = ~(r > 0)"),
    "transposed": _logits(
        "o = torch.zeros(8, 8); c{i} = r > o; m{i} = c{i}.t()", "d{i} = r > 0; n{i} = ~d{i}", "n{i} = r <= 0"
    ),
    "transposed row": _logits("c{i} = r[None] > 0; m{i} = c{i}.mT.expand(8, 8)", "n{i} = (r[None] <= 0).expand(8, 8)"),
    "expanded": _logits("m{i} = (r > 0).expand(8, 8)", "n{i} = (r <= 0).expand(8, 8)", "n{i} = r <= 0"),
    "of a transpose": _logits("m{i} = ({l}.mT > 0).mT", "n{i} = {l} <= 0", "n{i} = ({l} <= 0).mT"),
    "rolled": _logits("c{i} = {l} > 0; m{i} = c{i}.roll(1)", "n{i} = ~c{i}.roll(1)", "n{i} = ~c{i}.roll(1, 0)"),
    "flipped": _bool("m{i} = m{i}.flip(-1)", "n{i} = ~m{i}", "n{i} = ~m{i}.flip(-1)"),
    "diagonals": _bool("m{i} = m{i}.tril()", "n{i} = ~m{i}", "n{i} = (~m{i}).tril()"),
    # Reinterpreted bits
    "float as int32": _bool("m{i} = m{i}.float().view(torch.int32)", *_INT),
    "double as int64": _bool("m{i} = m{i}.double().view(torch.int64)", *_INT),
    "int32 as float": _bool("m{i} = m{i}.int().view(torch.float32)"),
    "bool as uint8": _bool("m{i} = m{i}.view(torch.uint8)", *_INT),
    "bool as int8": _bool("m{i} = m{i}.view(torch.int8)", *_INT, "n{i} = ~m{i}", "n{i} = ~m{i} + 2"),
    # Integers: J is any int64, U is a uint8 of 0 or 1, and P is any uint8.
    "uniform from 54 bits": _logits("h{i} = J & (2**54 - 1); m{i} = (h{i} / 2**54).to({l}.dtype)"),
    "uniform from 53 bits": _logits("h{i} = J & (2**53 - 1); m{i} = (h{i} / (2**53 - 1)).to({l}.dtype)"),
    "2**53": _logits(
        "j{i} = J % 4 + 2**53 - 1; m{i} = j{i} > 2**53", "n{i} = j{i} <= 2**53", "n{i} = j{i} <= 2**53 + 1"
    ),
    "equal to 2**53": _logits(
        "j{i} = J % 3 + 2**53; m{i} = j{i} == 2**53", "n{i} = j{i} != 2**53", "n{i} = j{i} != 2**53 + 1"
    ),
    "float of 2**53": _logits("j{i} = (J & 1) + 2**53; m{i} = j{i}.double() - 2**53"),
    "float of 2**24": _logits("j{i} = (J & 1) + 2**24; m{i} = j{i}.float() - 2**24"),
    "half of 2**11": _logits("j{i} = (J & 1) + 2**11; m{i} = j{i}.half() - 2**11"),
    "int64 overflow": _logits(
        "j{i} = (J & 1) + (2**63 - 1); m{i} = j{i} < 0", "n{i} = j{i} > 0", "n{i} = j{i} >= 2**62"
    ),
    "int64 product": _logits("j{i} = (J & 1) * 2**62; m{i} = (j{i} * 2) < 0", *_NOT, "n{i} = (j{i} * 4) == 0"),
    "shift into the sign": _logits("j{i} = (J & 1) << 63; m{i} = j{i} < 0", "n{i} = j{i} >= 0", "n{i} = j{i} == 0"),
    "bit 53": _logits("m{i} = (J >> 53) & 1", *_INT, "n{i} = (J & 2**53) == 0", "n{i} = (~J >> 53) & 1"),
    "sign bit": _logits("m{i} = (J >> 63) & 1", *_INT, "n{i} = J >= 0"),
    "remainder": _logits("m{i} = J % 2", *_INT, "n{i} = (J + 1) % 2"),
    "fmod": _logits("m{i} = torch.fmod(J, 2)", *_INT, "n{i} = (m{i} == 0)"),
    "floor": _logits("m{i} = J - J // 2 * 2", *_INT),
    "uint8 below 0": _logits("m{i} = U", "n{i} = m{i} - 1", "n{i} = (m{i} - 1) // 255", "n{i} = (m{i} + 255) & 1"),
    "uint8 above 255": _logits("m{i} = U * 255 + 1", "n{i} = m{i} + 255", "n{i} = 1 - m{i}"),
    "uint8 times 128": _logits("m{i} = (U * 128) >> 7", *_INT, "n{i} = ((U + 1) * 128) >> 7"),
    "int8 of 128": _bool("m{i} = m{i}.to(torch.int8) * -128 // -128", *_INT, "n{i} = m{i} - 1"),
    "255": _bool("m{i} = m{i}.to(torch.uint8) * 255", "n{i} = 255 - m{i}", "n{i} = ~m{i}"),
    "parity": _logits("m{i} = (P ^ (P >> 1)) & 1", *_INT),
    "digit": _logits("m{i} = P // 128", *_INT, "n{i} = (P < 128)"),
    "bool sum": _bool("m{i} = m{i} + m{i}", "n{i} = ~m{i}", "n{i} = 1 - m{i}.int()"),
    # Rounding
    "half": _logits("m{i} = ({l} * 1e-7).half() > 0", *_NOT, "n{i} = {l} <= 0"),
    "float32 threshold": _logits("m{i} = {l} > 0.1", "n{i} = {l} <= torch.tensor(0.1)", "n{i} = {l}.float() <= 0.1"),
    "sign": _logits("m{i} = (torch.sign({l}) + 1) / 2"),
    "sign of a rounded": _logits("m{i} = (torch.sign(torch.round({l})) + 1) / 2"),
    "clamped": _logits("m{i} = torch.sign({l}).clamp(0)", *_REAL, "n{i} = {l} <= 0"),
    "rounded clamp": _logits("m{i} = torch.round({l}.clamp(0, 1))", *_REAL, "n{i} = torch.round(1 - {l}.clamp(0, 1))"),
    "floor of a half more": _logits("p{i} = torch.sigmoid({l}); m{i} = torch.floor(p{i} + 0.5)"),
    "soft": _logits("m{i} = torch.sigmoid({l})"),
    "almost hard": _logits("m{i} = torch.sigmoid({l} * 1e4)"),
    **{
        f"straight-through, {name}": _logits(
            f"h{{i}} = ({{l}} > 0).to({dtype}); t{{i}} = (h{{i}} - {{l}}).detach(); m{{i}} = t{{i}} + {{l}}",
            *(*_REAL, "n{i} = (m{i} < 1).to({l}.dtype)", "n{i} = torch.floor(1.5 - m{i})", "n{i} = m{i} == 0"),
        )
        for name, dtype in {"exact": "{l}.dtype", "bfloat16": "torch.bfloat16", "int64": "torch.int64"}.items()
    },
    **{
        f"autograd.Function, {name}": _logits(
            f"m{{i}} = {name}.apply({{l}})",
            *(*_REAL, "n{i} = (m{i} < 1).to({l}.dtype)", "n{i} = (m{i} < 1)", "n{i} = m{i} == 0"),
        )
        for name in ("Rounded", "RoundedToHalf", "Narrow", "Sign")
    },
    "cast straight-through": _logits(
        "s{i} = {l}.float(); t{i} = (s{i} > 0).float() + s{i}; h{i} = t{i} - s{i}.detach(); m{i} = h{i}.to({l}.dtype)"
    ),
    # Calls and writes
    "fill": _logits("m{i} = torch.zeros_like({l}); m{i}[{l} > 0] = 1", *_REAL, "n{i} = {l} <= 0"),
    "index_fill": _logits("m{i} = torch.zeros_like({l}).index_fill(-1, torch.arange(4), 1)"),
    "top": _logits("t = {l}.flatten().topk(20).values[-1]; m{i} = {l} >= t", *_NOT, "n{i} = {l} < t"),
    "quantile": _logits("t = {l}.flatten().kthvalue(20).values; m{i} = {l} > t", "n{i} = {l} <= t", *_NOT),
    "gumbel": _logits("q{i} = torch.stack([{l}, -{l}], -1); m{i} = F.one_hot(q{i}.argmax(-1), 2)[..., 0]", *_INT),
    "heaviside": _logits("m{i} = torch.heaviside({l}, {l}.new_zeros(()))", *_REAL, "n{i} = {l} <= 0"),
    "division by zero": _bool("k{i} = m{i}.long(); m{i} = 7 % (k{i} + 1)", "n{i} = 7 // (k{i} + 7) - k{i}", *_INT),
    "other": _bool("n{i} = m{i}.flip(0)", "n{i} = ~n{i}"),
}
"""Masks that a careless pass takes for binary, or for a mask and its complement. For some of them, that is right."""

PRODUCTS: dict[str, Lines] = right.PRODUCTS | {
    "W * m.to(W.dtype)": ("{a}d = {m}.to(W.dtype)", "{a} = W * {a}d"),
    "where": ("{a} = torch.where({m}, W, 0)",),
    "masked_fill": ("{a}d = ~{m}", "{a} = W.masked_fill({a}d, 0)"),
    "W * m * 2": ("{a}d = W * {m}", "{a} = {a}d * 2"),
    "W * m.float()": ("{a}d = {m}.float()", "{a} = W * {a}d"),
}

# --- Products --------------------------------------------------------------------------------------------------------

PROJECTIONS: dict[str, Lines] = {
    "linear": ("{g} = F.linear(x, {a})",),
    "x @ a.t()": ("{a}t = {a}.t()", "{g} = x @ {a}t"),
    "matmul": ("{a}t = {a}.mT", "{g} = torch.matmul(x, {a}t)"),
    "addmm": ("{a}t = {a}.t()", "{g}0 = x.new_zeros(8)", "{g} = torch.addmm({g}0, x, {a}t)"),
    "inner": ("{g} = torch.inner(x, {a})",),
    "einsum": ("{g} = torch.einsum('...h,dh->...d', x, {a})",),
    "einsum, weight first": ("{g} = torch.einsum('dh,...h->...d', {a}, x)",),
    "einsum, output first": ("{g}t = torch.einsum('...h,dh->d...', x, {a})", "{g} = {g}t.movedim(0, -1)"),
    "einsum of a transpose": ("xt = x.mT", "{g} = torch.einsum('...hb,dh->...bd', xt, {a})"),
    "einsum of equal letters": ("{g} = torch.einsum('...h,...dh->...d', x, {a})",),
    "a @ x.mT": ("xt = x.mT", "{g}t = {a} @ xt", "{g} = {g}t.mT"),
    "rows": ("xr = x.reshape(-1, 8)", "{g}r = F.linear(xr, {a})", "{g} = {g}r.view(x.shape)"),
    "one more dimension": ("{g}r = F.linear(x[None], {a})", "{g} = {g}r[0]"),
    "bias": ("{g} = F.linear(x, {a}, b)",),
    "tensordot": ("{g} = torch.tensordot(x, {a}, dims=([-1], [-1]))",),
    "sum of products": ("{g}r = x[..., None, :] * {a}", "{g} = {g}r.sum(-1)"),
}

EXPERT_PROJECTIONS: dict[str, Lines] = right.PROJECTIONS_OF_EXPERTS | {
    "einsum, tokens first": ("{g}t = torch.einsum('eth,edh->ted', x, {a})", "{g} = {g}t.transpose(0, 1)"),
    "einsum, output first": ("{g}t = torch.einsum('eth,edh->det', x, {a})", "{g} = {g}t.movedim(0, -1)"),
    "einsum of dots": ("{g} = torch.einsum('...th,...dh->...td', x, {a})",),
    "einsum of dots on the right": ("{g} = torch.einsum('...h,...dh->...d', x, {a})",),
    "einsum of one expert": ("{g} = torch.einsum('eth,dh->etd', x, {a}[0])",),
    "a @ x.mT": ("xt = x.mT", "{g}t = torch.bmm({a}, xt)", "{g} = {g}t.mT"),
    "grouped_mm": (
        *("xr = x.flatten(0, 1)", "{a}t = {a}.mT", "{g}r = F.grouped_mm(xr, {a}t, offs=offs)"),
        "{g} = {g}r.view(x.shape)",
    ),
}

# `product a m` expands to the lines of a product, and `project a g` to the lines of a projection.
VALUES: dict[str, Lines] = {
    "masked": ("product a m", "project a g", "product b n", "project b v"),
    "value first": ("product b n", "project b v", "product a m", "project a g"),
    "difference of weights": ("product a m", "project a g", "b{i} = W - a{i}", "project b v"),
    "difference of products": ("project W f", "product a m", "project a g", "v{i} = f{i} - g{i}"),
    "gate of a difference": ("project W f", "product b n", "project b v", "g{i} = f{i} - v{i}"),
    **{
        f"joined, {name}": ("product a m", "product b n", *lines)
        for name, lines in {
            "cat": ("j{i} = torch.cat([a{i}, b{i}], -2)", "project j k", "g{i}, v{i} = k{i}.chunk(2, -1)"),
            "split": ("j{i} = torch.cat([a{i}, b{i}], -2)", "project j k", "g{i}, v{i} = k{i}.split(8, -1)"),
            "unflatten": (
                *("j{i} = torch.cat([a{i}, b{i}], -2)", "project j k"),
                *("o{i} = k{i}.unflatten(-1, (2, 8))", "g{i}, v{i} = o{i}.unbind(-2)"),
            ),
            "einsum": (
                *("j{i} = torch.stack([a{i}, b{i}])", "k{i} = torch.einsum('...h,kdh->k...d', x, j{i})"),
                "g{i}, v{i} = k{i}",
            ),
            "interleaved": (
                *("j{i} = torch.stack([a{i}, b{i}], -2)", "o{i} = j{i}.flatten(-3, -2)", "project o k"),
                *("g{i} = k{i}[..., ::2]", "v{i} = k{i}[..., 1::2]"),
            ),
        }.items()
    },
    "three operands": (
        *("a{i} = m{i}.to(x.dtype)", "g{i} = torch.einsum('...h,dh,dh->...d', x, W, a{i})"),
        *("b{i} = 1 - a{i}", "v{i} = torch.einsum('...h,dh,dh->...d', x, W, b{i})"),
    ),
}

# Whole layers whose masks are one stack `L` of logits `[3, d, h]`: the product, and the lines after it.
_STACKED: dict[str, tuple[str, str]] = {
    "masks first": ("torch.einsum('...h,ndh->n...d', x, {a})", "Y = F.silu(g) * v; y = Y.sum(0)"),
    "masks last": ("torch.einsum('...h,ndh->...dn', x, {a})", "Y = F.silu(g) * v; y = Y.sum(-1)"),
    "masks between": ("torch.einsum('...h,ndh->...nd', x, {a})", "Y = F.gelu(g) * v; y = Y.mean(-2)"),
    "matmul": ("x @ {a}.mT", "Y = F.relu(g) * v; y = Y.mean(0)"),
    "scalars": ("x @ {a}.mT", "Y = torch.tanh(g) * v; y = torch.einsum('nbd,n->bd', Y, V[0, :3])"),
    "router": (
        "torch.einsum('bh,ndh->nbd', x, {a})",
        "R = torch.softmax(V[:3] @ x.mT, 0); Y = torch.sigmoid(g) * v; y = (R[..., None] * Y).sum(0)",
    ),
    "router by einsum": (
        "torch.einsum('bh,ndh->nbd', x, {a})",
        "R = torch.softmax(x @ V[:3].t(), -1); y = torch.einsum('bn,nbd->bd', R, F.silu(g) * v)",
    ),
}
STACKED: dict[str, Lines] = {
    name: (
        *("m = L > 0", "A = W * m", "B = W * ~m"),
        *(f"g = {product.format(a='A')}", f"v = {product.format(a='B')}"),
        *rest.split("; "),
    )
    for name, (product, rest) in _STACKED.items()
}

ACTIVATIONS: dict[str, Lines] = right.ACTIVATIONS | {
    "identity": ("z{i} = g{i} * 1",),
    "in place": ("z{i} = F.silu(g{i}, inplace=True)",),
    "relu_": ("z{i} = g{i}.relu_()",),
    "scaled silu": ("e{i} = 1.702 * g{i}", "f{i} = torch.sigmoid(e{i})", "z{i} = g{i} * f{i}"),
}

TERMS: dict[str, Lines] = {
    "z * v": ("y{i} = z{i} * v{i}",),
    "v * z": ("y{i} = v{i} * z{i}",),
    "in place": ("y{i} = v{i}.mul_(z{i})",),
    "z * (v * 0.01)": ("v{i}s = v{i} * 0.01", "y{i} = z{i} * v{i}s"),
    "(1000 z) * (1000 v)": ("v{i}s = 1000 * v{i}", "z{i}s = 1000 * z{i}", "y{i} = z{i}s * v{i}s"),
    "z * v / 64": ("y{i}s = z{i} * v{i}", "y{i} = y{i}s / 64"),
    "z / 64 * v": ("z{i}s = z{i} / 64", "y{i} = z{i}s * v{i}"),
}

# Statements before all terms, after term i, and after all terms.
SUMS: dict[str, tuple[Lines, Lines, Lines]] = {
    name: (before, (each,) if each else (), after) for name, (before, each, after) in right.SUMS.items()
} | {
    "like x": (("y = torch.zeros_like(x)",), ("y = y + y{i}",), ()),
    "+= like x": (("y = torch.zeros_like(x)",), ("y += y{i}",), ()),
    "x first": (("y = x",), ("y = y{i} + y",), ()),
    "x last": ((), (), ("Y = torch.stack([{terms}])", "s = Y.sum(0)", "y = s + x")),
    "permuted residual": (("p = x.mT.contiguous()", "y = p.mT"), ("y = y + y{i}",), ()),
    "wide residual": (("y = x.double()",), ("y = y + y{i}",), ()),
    "narrow residual": (("y = x.bfloat16()",), ("y = y + y{i}",), ()),
    "bias": (("y = b",), ("y = y + y{i}",), ()),
    "bias += ": (("y = b.expand_as(x).clone()",), ("y += y{i}",), ()),
    "thousandths": (("y = 0",), ("y = y + 0.001 * y{i}",), ()),
    "thousands": (("y = 0",), ("y = y + y{i} * 1000",), ()),
    "means": (("y = 0",), ("y = y + y{i} / 3",), ()),
    "router": (
        ("R = torch.softmax(K @ x.mT, -2)", "Rt = R.mT", "y = 0"),
        ("y = y + Rt[..., {i} : {i} + 1] * y{i}",),
        (),
    ),
    "large router": (("R = x @ K * 100", "y = 0"), ("y = y + y{i} * R[..., {i} : {i} + 1]",), ()),
    "terms @ weights": ((), (), ("Y = torch.stack([{terms}], -1)", "y = Y @ V[0, : Y.shape[-1]]")),
    "einsum of terms": ((), (), ("Y = torch.stack([{terms}])", "y = torch.einsum('n...d->...d', Y)")),
    "addcmul": (("y = x * 1",), ("y = torch.addcmul(y, z{i}, v{i}, value=0.5)",), ()),
}
EXPERT_SUMS: dict[str, tuple[Lines, Lines, Lines]] = {
    "stack": ((), (), ("y = torch.stack([{terms}])",)),
    "cat": ((), (), ("y = torch.cat([{terms}])",)),
    "write": (("y = torch.zeros_like(x)",), ("y[{i}] = y{i}",), ()),
    "sum": (("y = 0",), ("y = y + y{i}",), ()),
}

# --- Between and after layers ----------------------------------------------------------------------------------------

TOUCHES: dict[str, str] = {
    "copy": "{v}.clone()",
    "contiguous": "{v}.contiguous()",
    "columns": "{v}.mT.contiguous().mT",
    "dropout in eval": "F.dropout({v}, 0.5, training=False)",
    "checked": "torch.nan_to_num({v})",
    "times 0.01": "{v} * 0.01",
    "times 1000": "1000 * {v}",
    "divided": "{v} / 100",
    "wide": "{v}.double()",
    "float": "{v}.float()",
    "rounded": "{v}.bfloat16().to({v}.dtype)",
    "half": "{v}.half()",
    "bias": "{v} + b",
    "reshaped": "{v}.reshape({v}.shape)",
    "viewed": "{v}.flatten().view({v}.shape)",
    "detached": "{v}.detach()",
    "damped": "Damped.apply({v})",
    "flipped": "{v}.flip(0)",
    "noise": "{v} + 0 * torch.rand_like({v})",
}
"""Expressions that replace a variable of a layer before it is read."""

VIEWS: Lines = (
    *perturbation_tables.VIEWS[perturbation_tables.is_array],
    *perturbation_tables.VIEWS[perturbation_tables.is_matrix],
    *("{v}.flatten()", "{v}.reshape(-1)", "{v}.mT.view(-1)", "{v}.mT.reshape(-1)", "{v}.mT.flatten()"),
    *("{v}.transpose(0, -1)", "{v}.as_strided((8,), (1,))", "{v}.as_strided((8, 2), (2, 1))", "{v}.reshape(8, -1)"),
    *("{v}.view(x.shape)", "{v}.reshape(x.shape)", "{v}.movedim(0, -1)", "torch.flatten({v}, 0, 1)", "{v}[..., ::2]"),
)
WRITES_TO_VIEWS: Lines = (
    *("", "{u}.mul_(2)", "{u}.zero_()", "{u}[0] = 1", "{u}.add_(1)", "with torch.no_grad(): {u}.mul_(0.5)"),
    "{u}.copy_({u}.flip(0))",
)
"""Writes to a view of the result. The program returns the view and the result."""

TAILS: dict[str, tuple[Lines, bool]] = {
    "nothing": ((), False),
    "scaled": (("w = y * 0.5",), True),
    "scaled in place": (("y *= 0.5",), False),
    "scaled up": (("y = y * 0.5",), False),
    "scaled as float": (("y = y.float() * 0.5",), False),
    "two scales": (("w = y * 0.5", "y = y * 0.25"), True),
    "mean": (("w = y.mean()",), True),
    "detached": (("w = y.detach()",), True),
    "cast": (("w = y.double()",), True),
    "cast to itself": (("w = y.to(y.dtype)",), True),
    "gate": (("w = g0 * 2",), True),
    "mask": (("w = ~m0",), True),
    "masked weight": (("w = a0",), True),
    "shape of the gate": (("w = torch.zeros(g0.shape)",), True),
    "norm": (("y = F.layer_norm(y, (8,))",), False),
    "tied weight": (("y = y @ W.mT",), False),
    "residual": (("y = y + x",), False),
    "residual first": (("y = x + y",), False),
    "residual in place": (("y += x",), False),
    "wide residual": (("y = x.double() + y",), False),
    "residual of the input": (("y = x0 + y",), False),
    "normalized": (("y = y / (y.abs().amax() + 1)",), False),
    "gradient": (("d, = torch.autograd.grad(y.sum(), x, create_graph=True)", "y = y + d"), False),
    "gradient penalty": (("d, = torch.autograd.grad(y.sum(), x, create_graph=True)", "w = d.square().sum()"), True),
    "gradient of the weight": (("d, = torch.autograd.grad(y.sum(), W, create_graph=True)", "w = d * 2"), True),
    "transposed": (("y = y.mT",), False),
    "out": (("w = torch.empty_like(y)", "torch.mul(y, 2, out=w)"), True),
    "buffer": (("w = torch.zeros_like(x)", "w.copy_(y)"), True),
    "cache": (("w = torch.zeros(3, *y.shape, dtype=y.dtype)", "w[1] = y"), True),
    "strides": (("y = y * y.stride(0)",), False),
    "contiguity": (("y = y * (2 if y.is_contiguous() else 3)",), False),
}
"""Lines after a layer, and True if the program also returns w."""

WRITES: Lines = (
    *("{v}.mul_(0.5)", "{v}.data.mul_(0.5)", "with torch.no_grad(): {v}.clamp_(-0.1, 0.1)", "{v}.zero_()"),
    *("with torch.no_grad(): {v}[0] = 1", "{v}.detach().neg_()", "with torch.no_grad(): {v}.mul_(0.5)"),
    *("with torch.inference_mode(): {v}.mul_(2)", "with torch.no_grad(): {v}.copy_({v}.flip(0))"),
    *("{v} = {v} * 0.5", "with torch.enable_grad(): {v}.mul_(2)"),
)
MASK_WRITES: Lines = ("{v}.logical_not_()", "{v}[0] = 1", "{v}.zero_()", "{v}.data.bitwise_xor_({v})", "{v} ^= True")
"""Writes to a bool or integer tensor."""


def _texts(lines: Lines) -> dict[str, str]:
    return {line or "nothing": line for line in lines}


TABLES: dict[str, Mapping[str, Any]] = {
    "dtype": DTYPES,
    "magnitude": MAGNITUDES,
    "surrounding": SURROUNDINGS,
    "input": INPUTS,
    "weight": WEIGHTS,
    "mask": right.SPELLINGS,
    "tricky mask": TRICKY_MASKS,
    "product": PRODUCTS,
    "projection": PROJECTIONS,
    "projection of experts": EXPERT_PROJECTIONS,
    "value": VALUES,
    "activation": ACTIVATIONS,
    "term": TERMS,
    "sum": SUMS,
    "sum of a loop over experts": EXPERT_SUMS,
    "stacked layer": STACKED,
    "touch": TOUCHES,
    "second layer": _texts(("none", "sum", "both", "chain", "chain with a residual")),
    "second x": {"the same": "x", "another": "x2"},
    "second weight": {"the same": "W", "another": "W2"},
    "second mask": {"the same": True, "another": False},
    "tail": TAILS,
    "view": _texts(VIEWS),
    "write to a view": _texts(WRITES_TO_VIEWS),
    "region": REGIONS,
    "extent": _texts(("whole", "beginning", "end", "some lines")),
    "write": _texts(WRITES),
    "write to a mask": _texts(MASK_WRITES),
    "trained": {"nothing": 0.0, "some": 0.5, "all": 1.0},
}
"""All tables, by the name of their parts."""
