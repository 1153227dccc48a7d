"""Tables of perturbations: statements and expressions that change a variable's value, or how it is computed.

`{v}` is the variable and `{u}` a new name. Each table maps a predicate to the texts that fit tensors for which the
predicate is true. Some texts do not change the function (`{v} * 1`). Others make eager raise an error, such as a write
to a leaf that requires a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Fits = Callable[[Tensor], bool]


def is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() > 0


def is_matrix(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() == 2


def is_square(tensor: Tensor) -> bool:
    return is_matrix(tensor) and tensor.shape[0] == tensor.shape[1]


def is_bool(tensor: Tensor) -> bool:
    return tensor.dtype is torch.bool and tensor.dim() > 0


def is_integer(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not is_bool(tensor) and tensor.dim() > 0


def is_array(tensor: Tensor) -> bool:
    return tensor.dim() > 0


def is_recorded(tensor: Tensor) -> bool:
    """True if a hook can be registered. The hook is called only if a result depends on the tensor."""
    return tensor.requires_grad


# --- Writes in place -------------------------------------------------------------------------------------------------

WRITES: dict[Fits, tuple[str, ...]] = {
    is_array: (
        "{v}.copy_({v}.flip(0))",
        "{v}.zero_()",
        "{v}.data.fill_(1)",
        "{v}[0] = {v}[1]",
        "torch._foreach_zero_([{v}])",
    ),
    is_real: (
        "{v}.mul_(1.5)",
        "{v} *= 2",
        "{v}[{v} > 0] = 0.5",
        "torch.add({v}, 1, out={v})",
        "{v}.data.mul_(2)",
        "{v}.detach().neg_()",
        "with torch.no_grad(): {v}.div_({v}.norm() + 1)",
        "torch.ops.aten.mul_.Tensor({v}, torch.full_like({v}, 2))",
        "F.silu({v}, inplace=True)",
        "F.relu_({v})",
        "F.dropout({v}, 0.5, training=False).mul_(2)",
        "F.dropout({v}, 0.5, True, True)",
        "{v}.uniform_()",
        "torch.nn.init.constant_({v}, 0.5)",
    ),
    is_matrix: (
        "{v}[:, 2:] += 1",
        "F.batch_norm({v}.detach().cumsum(0), {v}.detach()[0], {v}.detach()[1], training=True)",
        "F.embedding(torch.arange(3), {v}.detach(), max_norm=0.1)",
    ),
    is_square: ("{v}.add_({v}.t())",),
    is_bool: (
        "{v}.logical_not_()",
        "{v} ^= True",
        "{v}.data.logical_not_()",
        "torch.logical_not({v}, out={v})",
    ),
    is_integer: ("{v}.bitwise_xor_(1)", "{v} >>= 1", "{v}.data.mul_(3)"),
}

# Changes of a tensor's shape, history or storage in place.
METADATA: dict[Fits, tuple[str, ...]] = {
    is_array: (
        "{v}.t_()",
        "{v}.transpose_(0, -1)",
        "{v}.unsqueeze_(0)",
        "{v}.set_({v}.flip(0))",
        "{v}.data = {v}.flip(0)",
    ),
    is_real: ("{v}.detach_()", "{v}.requires_grad_(False)", "{v}.requires_grad_()"),
}

VIEWS: dict[Fits, tuple[str, ...]] = {
    is_array: (
        "{v}.view(-1)",
        "{v}.reshape(-1)",
        "{v}.contiguous()",
        "{v}[0]",
        "{v}[...]",
        "{v}.narrow(0, 1, 2)",
        "{v}.chunk(2)[0]",
        "{v}.unbind(0)[1]",
        "{v}.detach()",
        "{v}.data",
        "{v}.as_strided((4,), (1,))",
        "{v}.to({v}.dtype)",
        "{v}.expand_as({v})",
        "{v}.view_as({v})",
        "torch.positive({v})",
        "torch.broadcast_tensors({v}, {v})[0]",
        "torch.nn.Identity()({v})",
    ),
    is_real: (
        "F.dropout({v}, 0.5, training=False)",
        "{v}.double()",
        "{v}.real",
        "{v}.view(torch.int64)",
        "torch.nn.Flatten(0)({v})",
    ),
    is_matrix: ("{v}.t()", "{v}.mT", "{v}.permute(1, 0)", "{v}.diagonal()", "{v}.unfold(0, 2, 2)", "{v}.detach().t()"),
}

WRITES_TO_VIEWS: dict[Fits, tuple[str, ...]] = {
    is_array: ("{u}.zero_()", "{u}[0] = 1", "with torch.no_grad(): {u}.copy_({u}.flip(0))"),
    is_real: ("{u}.mul_(2)", "{u}.neg_()"),
}

# --- Changes of a value ----------------------------------------------------------------------------------------------

# Expressions that replace all later uses of a variable, or one use.
DRAWS: dict[Fits, tuple[str, ...]] = {
    is_real: (
        "{v} + 0 * torch.rand_like({v})",
        "F.dropout({v}, 0.5)",
        "F.rrelu({v}, training=True)",
        "{v} * torch.bernoulli(torch.full_like({v}, 0.5))",
        "{v} * torch._standard_gamma({v}.detach().abs() + 1)",
        "{v} + torch.normal(0.0, {v}.detach().abs())",
        "{v}[torch.randperm({v}.shape[0])]",
        "{v} * torch.ones_like({v}).bernoulli_(0.5)",
    ),
    is_bool: (
        "{v} & (torch.rand({v}.shape) > 0.5)",
        "torch.bernoulli({v} * 0.5).bool()",
        "torch.empty_like({v}).bernoulli_(0.5)",
    ),
}

DTYPES: dict[Fits, tuple[str, ...]] = {
    is_real: (
        "{v}.to(torch.bfloat16).to({v}.dtype)",
        "{v}.float()",
        "{v}.bfloat16()",
        "{v}.long().to({v}.dtype)",
        "{v}.to(torch.complex128).real",
    ),
    is_bool: ("{v}.float()", "{v}.double()", "{v}.to(torch.uint8)", "{v}.int().bool()", "{v}.byte() * 255"),
    is_integer: ("{v}.double()", "{v}.bool()", "{v}.to(torch.int8)", "{v}.float().byte()"),
}

GRADIENTS: dict[Fits, tuple[str, ...]] = {
    is_real: (
        "{v}.detach()",
        "{v}.data",
        "{v}.detach() + {v} - {v}.detach()",
        "2 * {v} - {v}.detach()",
        "torch.where({v} > 0, {v}, {v}.detach())",
        "Damped.apply({v})",
        "torch.tensor(0.0) * {v}.sum() + {v}.detach()",
    ),
}

HOOKS = (
    "{v}.register_hook(lambda grad: grad * 0.1)",
    "{v}.register_hook(lambda grad: grad.clamp(-0.1, 0.1))",
    "{v}.register_hook(lambda grad: torch.zeros_like(grad))",
    "{v}.register_hook(lambda grad: grad * {v}.detach().sum())",
)

USERS: dict[Fits, tuple[str, ...]] = {
    is_array: (
        "{u} = {v}",
        "{u} = {v}.sum()",
        "{u} = {v}.detach()",
        "{u} = torch.zeros({v}.shape[0])",
    ),
    is_real: (
        "{u} = ({v} * torch.sigmoid({v})).mean()",
        "{u} = {v}.norm().detach()",
        "{u} = {v} + torch.rand(1)",
    ),
    is_bool: ("{u} = ~{v}", "{u} = {v}.double().mean()"),
}

# --- Pairs -----------------------------------------------------------------------------------------------------------

# Pairs of expressions that look equal. The first replaces earlier uses of a variable, and the second replaces later
# uses, for example the uses in the gate and in the value. Pairs in `EQUAL` are equal, and most other pairs are not.
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
