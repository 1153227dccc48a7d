"""Pairs of expressions that look equal: the ones in `EQUAL` are, and most others are not.

A pair replaces the uses of a variable `{v}`, for example in the gate and in the value of a layer. The table maps a
predicate of tensors to the pairs that fit them.
"""

from __future__ import annotations

from perturbation_tables import Fits, is_bool, is_integer, is_matrix, is_real, is_square

EQUAL = (
    ("torch.tanh({v})", "torch.tanh({v})"),
    ("{v} * 2", "{v} * 2"),
    ("{v}.mul(2)", "torch.mul({v}, 2)"),
    ("torch.add({v}, 2)", "torch.add({v}, 1, alpha=2)"),
    ("{v} * 1", "{v} * True"),
    ("{v} ** 2", "{v} ** 2.0"),
)

PAIRS: dict[Fits, tuple[tuple[str, str], ...]] = {
    is_real: (
        *EQUAL,
        ("{v}", "{v}.detach()"),
        ("{v} * 1", "{v}.detach() * 1"),
        ("F.dropout({v}, 0.5)", "F.dropout({v}, 0.5)"),
        ("{v} * torch.bernoulli(torch.full_like({v}, 0.5))", "{v} * torch.bernoulli(torch.full_like({v}, 0.5))"),
        ("torch.add({v}, 1, alpha=2)", "torch.sub({v}, 1, alpha=2)"),
        ("torch.add({v}, {v}, alpha=2)", "torch.add({v}, {v}, alpha=3)"),
        ("{v} - 2", "2 - {v}"),
        ("torch.div({v}, 2)", "torch.div({v}, 2, rounding_mode='floor')"),
        ("torch.pow({v}, 2)", "torch.pow(2, {v})"),
        ("torch.copysign({v}, 0.0)", "torch.copysign({v}, -0.0)"),
        ("{v} * ~torch.tensor(1)", "{v} * ~torch.tensor(True)"),
        ("{v} * torch.full((1,), 3)", "{v} * torch.full((1,), 3, dtype=torch.bool)"),
        ("{v} + torch.full((1,), 1).bitwise_not()", "{v} + torch.full((1,), True).bitwise_not()"),
        ("{v}.clamp(min=0)", "{v}.clamp(max=0)"),
        ("{v}.clamp(-0.5, 0.5)", "{v}.clamp(-0.5)"),
        ("torch.where({v} > 0, {v}, -{v})", "torch.where({v} > 0, -{v}, {v})"),
        ("torch.where({v} > 0, {v}, -{v})", "(-{v}).where({v} > 0, {v})"),
        ("{v}.round()", "{v}.round(decimals=1)"),
        ("F.gelu({v})", "F.gelu({v}, approximate='tanh')"),
        ("torch.roll({v}, 1)", "torch.roll({v}, 2)"),
        ("{v}.softmax(0)", "{v}.softmax(-1)"),
        ("{v}.cummax(0)[0]", "{v}.cummax(0)[1].double()"),
        ("{v} + {v}.mean()", "{v} + {v}.median()"),
        ("F.layer_norm({v}, (8,))", "F.layer_norm({v}, (8,), eps=0.1)"),
        ("{v}.float().double()", "{v}.bfloat16().double()"),
        ("torch.stack([{v}, -{v}])[0]", "torch.stack([{v}, -{v}])[1]"),
        ("{v}.gather(0, {v}.argsort(0))", "{v}.gather(0, {v}.argsort(0, descending=True))"),
        ("Damped.apply({v})", "Damped.apply({v})"),
        ("Damped.apply({v})", "{v}.clone()"),
    ),
    is_matrix: (
        ("torch.roll({v}, 1, 0)", "torch.roll({v}, 1, 1)"),
        ("{v}.tril()", "{v}.tril(1)"),
        ("{v}.chunk(4)[1]", "{v}.tensor_split(4)[1]"),
        ("{v}.chunk(4)[2]", "{v}.split(2)[1]"),
        ("{v}[[1, 0, 2]]", "{v}[[0, 1, 2]]"),
        ("torch.cat([{v}[1:], {v}[:1]])", "torch.cat([{v}[:-1], {v}[-1:]])"),
        ("F.pad({v}[:, 1:], (1, 0))", "F.pad({v}[:, 1:], (1, 0), value=1.0)"),
        ("torch.einsum('ij->ij', {v})", "torch.einsum('ij,ij->ij', {v}, {v})"),
    ),
    is_square: (
        ("{v}.transpose(0, 1)", "{v}.transpose(0, 0)"),
        ("torch.einsum('ij->ji', {v})", "torch.einsum('ij->ij', {v})"),
        ("{v} + {v}.sum(0)", "{v} + {v}.sum(1)"),
    ),
    is_bool: (
        ("{v}", "{v}.clone()"),
        ("~{v}", "torch.logical_not({v})"),
        ("{v} & {v}.flip(0)", "{v} | {v}.flip(0)"),
        ("torch.where({v}, {v}.flip(0), {v}.roll(1))", "{v}.where({v}.flip(0), {v}.roll(1))"),
        ("{v}.mT", "{v}"),
        ("torch.eq({v}, True)", "torch.ne({v}, True)"),
        ("{v} ^ (torch.rand(8) > 0.5)", "{v} ^ (torch.rand(8) > 0.5)"),
    ),
    is_integer: (("{v} >> 1", "{v} >> 2"), ("{v} // 2", "{v} % 2"), ("{v} + 1", "{v} - 1"), ("{v}.mT", "{v}")),
}
