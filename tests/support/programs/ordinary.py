"""Random programs of operators that ordinary models use, without an MGLU layer.

Each line comes from a template (`ordinary_templates`). Results of earlier lines fill the fields of the template. A line
is dropped if eager torch raises an error, so templates need not consider shapes and dtypes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.support.programs.source_programs import NAMES, SourceProgram, assigned

# Fields of templates: {any}, {real}, {int}, {mask}, {matrix}, {batch}, {image} and {complex} are tensors. Some fields
# relate to the first tensor of the template. {like} broadcasts with the first tensor, and {twin} has its shape. The
# last size of the first tensor is the last size of {weight}, and is the second last size of {right}. {dim} is a
# dimension of the first tensor, and {order} is a permutation of its dimensions. All other fields are constants
# (`CONSTANTS`).
ELEMENTWISE = """
{any} + {like} | {any} - {like} | {any} * {like} | {any} / {like} | {real} * {real} | {number} - {any}
{any} + {number} | {number} * {real} | {real} / {number} | {number} / {real} | {any} // {number} | {any} % {number}
{any} % {like} | torch.add({any}, {like}, alpha={number}) | torch.sub({any}, {number}, alpha=2)
torch.rsub({any}, {like}) | -{any} | {any}.add(other={like}) | torch.mul({any}, other={like})
torch.mul(input={any}, other={number}) | {any}.neg() | torch.div({any}, {like}, rounding_mode={rounding})
{any}.div({number}, rounding_mode={rounding}) | torch.true_divide({any}, {like}) | torch.floor_divide({any}, {like})
torch.remainder({any}, {number}) | torch.fmod({any}, {like}) | {real} ** {exponent} | {any} ** {exponent}
torch.pow({any}, {exponent}) | {any}.pow(exponent={exponent}) | {number} ** {real} | {any} ** {like}
torch.square({any}) | {real}.reciprocal() | torch.float_power({any}, {exponent}) | 1 / (1 + torch.exp(-{real}))
{real} * torch.sigmoid({real}) | {real}.erf() | torch.exp({real}) | torch.log({real}) | torch.sqrt({real})
torch.rsqrt({real}.abs()) | torch.abs({any}) | {any}.sign() | torch.tanh({real}) | {real}.sigmoid() | F.silu({real})
F.gelu({real}) | F.gelu({real}, approximate="tanh") | F.relu({any}) | F.mish({real}) | F.softplus({real}, beta=2)
torch.clamp({any}, {number}, {number}) | {any}.clamp(min={number}) | torch.clamp({any}, max={number}) | {any}.clip(0, 1)
torch.floor({real}) | torch.trunc({real}) | torch.frac({real}) | torch.lerp({real}, {twin}, 0.3) | {any}.logit(eps=0.1)
torch.addcmul({real}, {twin}, {twin}, value=2) | torch.addcdiv({real}, {twin}, {twin}) | torch.nan_to_num({any})
F.threshold({real}, 0.1, 20.0) | F.dropout({any}, 0.0) | F.dropout({real}, p=0.0, training=True) | {real} * 10**30
F.dropout({real}, 0.5, training=False) | F.dropout({real}, 0.5) | torch.nn.Dropout(0.0)({real}) | {any} * 2**62
{real} + 0.1 * torch.tanh({real}) | {any} * scale | {any} + count | {real} * {any}.shape[-1] | {any} * {any}.numel()
torch.polar({real}, {twin}) | {complex} * {like} | {any} * 1j | {complex}.conj() | {complex}.real | {complex}.imag
"""

MASKS = """
{any} > {number} | {any} >= {like} | {any} < 0 | {any} <= {like} | {any} == {like} | {any} != {number} | {any}.gt(0)
torch.gt({any}, {like}) | torch.ge(input={any}, other=0) | torch.eq({any}, {number}) | {any}.ne({like}) | {any} > scale
~{mask} | {mask} & {mask} | {mask} ^ True | {mask} ^ {mask} | {mask}.logical_not() | torch.logical_or({any}, {like})
torch.logical_and({any}, {like}) | torch.logical_xor({mask}, {like}) | torch.isnan({any}) | torch.isfinite({real})
torch.isclose({real}, {twin}) | torch.bitwise_not({int}) | ({int} >> 1) & 1 | {int} & {number} | {int} % 2 | {int} << 1
1 - {mask}.to({dtype}) | 1 - {int} | {number} - {mask}.float() | {mask} * {number} | {mask}.int() - 1 | {mask} + {mask}
{mask} * math.inf | {mask}.float() * math.nan | torch.sign({real}) * math.inf | (torch.sign({any}) + 1) / 2
torch.sign({real}).clamp(min=0) | torch.round(torch.sigmoid({real})) | torch.relu(torch.sign({real})) | {mask} / 0
{mask}.float() ** {exponent} | {int} < torch.full_like({int}, 0.5) | torch.full_like({any}, {number}) - {mask}
torch.ones_like({any}) - {any} | torch.where({mask}, {like}, {like}) | torch.where({mask}, {like}, {number})
torch.where({mask}, {number}, {number}) | {any}.where({mask}, {like})
torch.where(condition={mask}, input={like}, other={like}) | {any}.masked_fill({mask}, {number})
torch.masked_fill({any}, mask={mask}, value={number}) | {any}.masked_fill(~{mask}, 0)
{matrix} * (1 - {real}) | {matrix} - {matrix} * {mask} | {matrix} * (2 * {mask}.float() - 1)
{matrix} * torch.sign({matrix}) | W * m | W * f | W * i | W * ~m | W * (1 - f) | W - W * m | m.float() * V | W * (L > 0)
M * W | S * M | W * ~(L > 0) | W * (L <= 0) | (L > 0).float() + L - L.detach() | ((L > 0).float() - L).detach() + L
Sign.apply({real}) | W * Sign.apply(L)
"""

PRODUCTS = """
F.linear({real}, {weight}) | F.linear(x, W) | F.linear(x, W, b) | F.linear(X, W) | F.linear(input=x, weight=W)
F.linear({real}, {weight}) ** {exponent} | F.linear(x, W * m) | F.linear(x, W * ~m) | F.linear(x, {weight}) | x @ W.T
F.linear(x, W * f) * F.linear(x, V * (1 - f)) | F.silu(F.linear(x, W)) * F.linear(x, V)
F.linear(x, W) - F.linear(x, V) | F.silu(F.linear(x, W * m)) | F.relu(F.linear(x, W * m)) * F.linear(x, V * ~m)
F.linear(x, W * m) * F.linear(x, W * m) | F.silu(F.linear(x, W * m)) * F.linear(x, W) | {real} @ {right}
torch.matmul({real}, {right}) | {real}.matmul({weight}.mT) | torch.matmul(input={real}, other={right})
torch.mm({matrix}, {right}) | torch.mm(input={matrix}, mat2={right}) | torch.bmm({batch}, {right})
torch.bmm({batch}, {batch}.mT) | torch.addmm({real}, {matrix}, {right})
torch.addmm({real}, {matrix}, {right}, beta=0.5, alpha=2) | torch.baddbmm({batch}, {batch}, {right})
torch.baddbmm({batch}, {batch}, {batch}.transpose(1, 2), beta=0) | torch.inner({real}, {weight})
torch.outer({real}, {real}) | torch.tensordot({real}, {weight}, dims=([-1], [-1]))
torch.tensordot({real}, {right}, dims=1) | torch.mv({matrix}, {real}) | torch.dot({real}, {real})
torch.einsum("bh,dh->bd", x, W) | torch.einsum("bh,ndh->nbd", x, S) | torch.einsum("ij->ji", {matrix})
torch.einsum("bth,dh->btd", X, W) | torch.einsum("...h,dh->...d", {real}, {weight})
torch.einsum("ij,ij", {matrix}, {twin}) | torch.einsum("bh,dh,dh->bd", x, W, f) | torch.einsum("ii->i", {matrix})
torch.einsum("bh,dh", x, W) | x @ S.mT | S @ x.mT | torch.einsum("bh,ndh->nbd", x, M * W)
F.scaled_dot_product_attention({batch}, {batch}, {batch}) | torch.softmax(x @ x.mT, -1) @ x | torch.vdot({real}, {real})
F.conv2d(image, kernel) | F.conv2d(image, kernel, padding=1, stride=2) | F.conv1d(X, S)
"""

VIEWS = """
{any}.permute({order}) | {any}.permute(dims=({order},)) | torch.permute({any}, dims=({order},))
{any}.transpose({dim}, {dim}) | {any}.transpose(dim0={dim}, dim1={dim}) | torch.transpose({any}, dim0={dim}, dim1={dim})
{any}.transpose(-1, dim1=-2) | {any}.swapaxes({dim}, {dim}) | {any}.swapaxes(axis0={dim}, axis1={dim})
{any}.flatten({dim}, {dim}) | {any}.flatten(start_dim={dim}) | {any}.ravel()
torch.flatten({any}, start_dim=0, end_dim=1) | {any}.unflatten({dim}, (-1, 2))
{any}.unflatten(dim={dim}, sizes=(1, -1)) | torch.unflatten({any}, 0, (-1, 1)) | {any}.unsqueeze({dim})
{any}.unsqueeze(dim={dim}) | torch.unsqueeze({any}, -1) | {any}.squeeze() | {any}.squeeze({dim})
torch.squeeze({any}, dim={dim}) | {any}.view(-1) | {any}.reshape(-1, 1) | {any}.reshape(shape=(-1,))
{any}.view({any}.shape[::-1]) | {any}.view_as({twin}) | {any}.view(-1, {any}.size(-1))
{any}.expand({size}, *{any}.shape) | {any}.expand(size=(-1,) * {any}.dim()) | {any}.expand_as({like})
{any}.repeat(2, 1) | {any}.repeat(repeats=(1, 2)) | torch.broadcast_to({any}, size=(2, *{any}.shape))
{any}.contiguous() | {any}.chunk(2, dim={dim})[0] | torch.chunk({any}, chunks=2, dim={dim})[-1] | {any}.chunk(2)[1]
{any}.clone() | torch.split({any}, 2, dim={dim})[0] | {any}.split(1)[-1] | {any}.split([1, 2], dim={dim})[1]
{any}.tensor_split(2)[0] | torch.split({any}, split_size_or_sections=2, dim={dim})[-1] | {any}.unbind()[0]
torch.unbind({any}, dim={dim})[-1] | {any}.unfold({dim}, 2, 1) | {any}.as_strided((2, 2), (1, 1))
{any}.select({dim}, 0) | {any}.select(dim={dim}, index=-1) | torch.select({any}, {dim}, index=1)
torch.cat([{any}, {like}], {dim}) | torch.cat(({any}, {like}), dim={dim})
torch.cat(tensors=[{any}, {twin}], dim={dim}) | torch.cat([{any}, {any}]) | torch.concat([{any}, {twin}], axis={dim})
torch.stack([{any}, {twin}]) | torch.stack(({any}, {twin}), dim={dim}) | torch.stack([{any}] * 3, -1)
{matrix}.reshape(2, -1) | {any}.reshape({any}.shape[0], -1) | {any}.swapaxes(-1, axis1=-2)
"""

INDEXING = """
{any}[0] | {any}[-1] | {any}[..., 0] | {any}[:, 0] | {any}[None] | {any}[..., None] | {any}[:, None] | {any}[1:]
{any}[()] | {any}[..., :1] | {any}[:, :2] | {any}[::2] | {any}[..., 1:2] | {any}[0, 0] | {any}[0, ..., None]
{any}[:, None, 0] | {any}[True] | {any}[..., -1:] | {any}[: {any}.shape[0] // 2] | {any}[[0, 1]]
{any}[[0, -1], [1, 0]] | {any}[index] | {any}[:, index] | {any}[index, index] | {any}[torch.tensor([0, 1])]
{any}[index[0]] | {any}[None, ..., None] | {any}[slice(None), slice(1)] | {any}[..., [0, 1]]
torch.take({any}, index) | torch.gather({any}, {dim}, {any}.argsort(dim={dim})) | {matrix}.gather(0, index[:, None])
torch.scatter({any}, {dim}, torch.zeros_like({any}, dtype=torch.long), {number})
{any}.index_fill({dim}, index, {number}) | {any}.scatter_add(0, torch.zeros_like({any}, dtype=torch.long), {twin})
torch.index_put({any}, ({mask},), torch.tensor({number})) | {any}.index_copy(0, index[:1], {any}[:1])
{any}[..., count:] | {any}[{int}.long() % 2] | M[0] | S[1] | M[-1]
"""

REDUCTIONS = """
{any}.sum() | torch.sum({any}, {dim}) | {any}.sum(dim={dim}, keepdim={flag}) | torch.sum(input={any}, dim={dim})
{any}.sum(axis=0) | torch.sum({any}, dim=(0, 1)) | {any}.sum(({dim},), dtype=torch.float64)
{any}.sum({dim}, keepdims=True) | {real}.mean() | torch.mean({real}, {dim}, keepdim={flag})
{any}.all() | torch.var_mean({real}, {dim})[1] | {any}.any(dim={dim}) | torch.all({any}, {dim})
F.layer_norm({real}, {any}.shape[-1:]) | F.rms_norm({real}, (4,))
F.layer_norm({real}, normalized_shape=(4,), eps=1e-3) | F.batch_norm({real}, None, None, training=True)
{any}.square().mean(-1, keepdim=True) | torch.renorm({matrix}, 2, 0, 1.0) | torch.aminmax({any})[1]
torch.stack([F.linear(x, W * w) for w in M]).sum(0) | torch.sum(M * W, 0) | sum(M.unbind()) | torch.einsum("ndh->dh", S)
"""

CONSTANTS = """
torch.full_like({any}, {number}) | torch.full_like({any}, {number}, dtype={dtype}) | torch.full(({size}, 2), {number})
torch.full(size=({size},), fill_value={number}) | {any}.new_full((2,), {number})
{any}.new_full(size=(2, 1), fill_value={number}) | torch.zeros_like({any}) | torch.ones_like({any}, dtype={dtype})
torch.zeros({size}, {size}, dtype={dtype}) | {any}.new_zeros(3, 4) | torch.ones(({size},), dtype={dtype})
{any}.new_ones({any}.shape) | torch.tensor({number}) | torch.tensor([1.0, {number}], dtype={dtype})
{any}.type({dtype}) | {any}.float() | {any}.double() | {any}.half() | {any}.bfloat16() | {any}.bool() | {any}.int()
{real}.to(torch.complex64) | {any}.byte() | {any}.view(torch.int32) | {any}.bernoulli()
torch.bernoulli({real}.sigmoid()) | {any}.to(torch.uint8) | {any}.to({dtype}, copy=True)
"""

INPLACE = """
{any}.add_({like}) | {any}.mul_({number}) | {any}.mul_({like}) | {any}.sub_(1)
{any}.div_({number}, rounding_mode={rounding}) | {any}.neg_() | {any}.clamp_(min={number}) | {any}.relu_()
F.relu({any}, inplace=True) | {any}.sigmoid_() | {any}.fill_({number}) | {any}.zero_() | {any}.copy_({like})
{any}.masked_fill_({mask}, {number}) | {mask}.logical_not_() | {any}.exp_() | {any}.pow_({exponent}) | {any}.t_()
{any}.transpose_({dim}, {dim}) | {any}.unsqueeze_({dim}) | {any}.squeeze_() | {any}.clone().mul_({like})
{any}.clone().zero_() | {any}[0].mul_({number}) | {any}.view(-1).add_(1) | {any}.data.add_(1) | {any}.detach().mul_(2)
{any}.clone().masked_fill_(~{mask}, 0) | {any}.select(0, 0).neg_() | {any}.swapaxes_({dim}, {dim})
{real}.clone(); {name}.mul_({mask}) | {real}.clone(); {name}[~{mask}] = 0
torch.zeros_like({real}); {name}[{mask}] = {same}[{mask}] | W.clone(); {name} *= m; {name} = F.linear(x, {name})
W.clone(); {name}.masked_fill_(m, {number}); {name} = F.linear(x, {name}) - F.linear(x, W)
"""

# Statements that define no variable.
WRITES = """
{any}[0] = {number} | {any}[{mask}] = {number} | {any}[~{mask}] = 0 | {any}[..., 0] = {like} | {any}[index] = {number}
{any}[:] = {like} | {any} += {like} | {any} *= {number} | {any} -= 1 | {any} /= 2 | {any}[:, 1:] += {number}
{any}[{mask}] *= 2 | {any} &= {mask} | {any}[{any} > 0] = {number} | {any}[:, index] = {number}
{any}[{mask}] = torch.tensor({number}) | {any}.data[0] = {number}
"""

GRADIENTS = """
{any}.detach() | {any}.data | {any}.detach().clone() | torch.detach({any}) | {any} + ({any} - {any}).detach()
Damped.apply({real}) | Sign.apply({real}) | checkpoint(torch.sin, {real}, use_reentrant=False)
checkpoint(lambda y: F.silu(y) * y, {real}, use_reentrant=False) | torch.vmap(lambda y: y * 2)({any})
checkpoint(lambda y: y.mul(2).add_(1), {real}, use_reentrant=False) | torch.func.jvp(torch.sin, ({real},), ({twin},))[1]
torch.vmap(lambda y: F.linear(y, W))(x) | Damped.apply(F.linear(x, W * m))
"""

# Gated layers with masked weights that differ from MGLU in a detail.
ALMOST = """
{act}(F.linear(x, W * m)) * F.linear(x, V * ~m) | {act}(F.linear(x, W * m)) * F.linear(x, W * m)
{act}(F.linear(x, W * ~m)) * F.linear(x, W) | {act}(F.linear(x, W * m)) * F.linear(x + 1, W * ~m)
{act}(F.linear(x, W * M[0])) * F.linear(x, W * ~M[1]) | {act}(x @ (W * m).T) * (x @ (W - V * m).T)
{act}(F.linear(x, W * f)) * F.linear(x, W * (0.5 - f)) | {act}(F.linear(x, W * m)) * F.linear(x, W * (m - 0.5))
{act}(x @ W.T) * (x @ (W * m).mT) | {act}(F.linear(x, W * m)) * F.linear(x, W * ~m).flip(0)
{act}(F.linear(x, W * m)) + F.linear(x, W * ~m) | {act}(F.linear(x, W * m)) * F.linear(x, ~m * 1.0)
torch.stack([{act}(F.linear(x, W * w)) * F.linear(x, V * ~w) for w in M]).sum(0)
sum({act}(F.linear(x, W * w)) * F.linear(x, W * w) for w in M)
torch.einsum("nbd,nbd->bd", {act}(x @ (W * M).mT), x @ (V * ~M).mT)
torch.einsum("nbd,nbd->nb", {act}(x @ (W * M).mT), x @ (W * ~M).mT)
({act}(torch.einsum("bh,ndh->nbd", x, W * M)) * torch.einsum("bh,ndh->nbd", x, W * ~M.flip(0))).sum(0)
{act}(x @ (W * M).mT) * (x @ (S * ~M).mT) | {act}(F.linear(x, W * m[:, :1])) * F.linear(x, W * ~m[:, :1])
{act}(F.linear(x, W * (L > 0))) * F.linear(x, W * (L < 0)) | {act}(X @ (W * m).T) * (X @ (V * ~m).T)
{act}(F.linear(x, W * (i > 0))) * F.linear(x, W * (i < torch.full_like(i, 0.5)))
{act}(F.linear(x, torch.where(m, W, 0))) * F.linear(x, torch.where(m, W, 0))
{act}(F.linear(x, W.masked_fill(m, 0))) * F.linear(x, W.masked_fill(m, 0))
{act}(F.linear(x, W.masked_fill(m, 1))) * F.linear(x, W.masked_fill(~m, 0))
{act}(F.linear(x, W * torch.div(i, 2, rounding_mode={rounding}))) * F.linear(x, W * (1 - i / 2))
{act}(F.linear(x, W * m, b)) * F.linear(x, V * ~m, b) | {act}(x @ (W * m).transpose(dim0=0, dim1=0)) * (x @ (W * ~m))
r * ({act}(F.linear(x, W * m)) * F.linear(x, V * ~m)) | F.glu(F.linear(x, torch.cat([W * m, V * ~m])))
{act}(F.linear(x, W * torch.sign(L).clamp(min=0))) * F.linear(x, W * (1 - torch.round(torch.sigmoid(L))))
{act}(F.linear(x, W * (u & 1))) * F.linear(x, W * (u % 2))
{act}(F.linear(F.dropout(x, 0.5), W * m)) * F.linear(F.dropout(x, 0.5), W * ~m)
{act}(F.linear(x, W.clone().mul_(m))) * F.linear(x, V.clone().mul_(~m))
"""

# Lines whose shapes or numbers depend on data, for `capture_dynamic_output_shape_ops` and `capture_scalar_outputs`.
DATA_DEPENDENT = """
{any}[{mask}] | {any}[{any} > 0] | {any}[{any} > 0] > {number} | torch.masked_select({any}, {mask})
torch.nonzero({any}) | {any}.nonzero()[:, 0] | {any}[{mask}] * 2 | {any}[{any} != 0].sum()
torch.nonzero({any}, as_tuple=True)[0] | {any}[{mask}].clone() | {any} * {any}.sum().item() | {any} + {int}.sum().item()
{matrix}[{mask}[:, 0]] | {real}[{real}[:, 0] > 0] | torch.argwhere({any}) | torch.repeat_interleave({any}, index, dim=0)
F.linear({real}[{real}[:, 0] > 0], {weight}) | torch.unique(index) | {matrix}[{matrix}.sum(1) > 0].T
{matrix}[{mask}.any(1)].permute(dims=(1, 0)) | F.linear(x[r[:, 0] > 0.5], W * m) | F.silu(F.linear(x[r[:, 0] > 0.5], W))
(W * m)[m] | W[L > 0] | x[x[:, 0] > 0] @ W.T | torch.where({any}[{mask}] > 0, 1, 0) | {any}[{mask}].sigmoid()
{any}.flatten().clone(); {name}[{same}[{same} == {same}] != {number}] = {number}
{any}.flatten() + {same}[{same} == {same}]
{any}.flatten().clone(); {name}.masked_fill_({same}[{same} == {same}] > 0, {number})
{matrix}.clone(); {name}[{same}[{same}[:, 0] == {same}[:, 0]] > 0] = 0 | {matrix} * {same}[{same}[:, 0] == {same}[:, 0]]
{matrix} * ({same}[{same}[:, 0] == {same}[:, 0]] > 0) | F.linear({real}[{same}[:, 0] == {same}[:, 0]], {weight})
torch.where({matrix}[{same}[:, 0] == {same}[:, 0]] > 0, {same}, 0) | F.linear(x, W * (W[W[:, 0] == W[:, 0]] > 0))
F.linear(x, W) * F.linear(x[x[:, 0] == x[:, 0]], W)
"""


def _templates(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for line in text.strip().splitlines() for part in line.split(" | "))


# Kind of line -> relative frequency and templates. `{mask} | {mask}` is here, because tables use ` | ` as separator.
TEMPLATES: dict[str, tuple[float, tuple[str, ...]]] = {
    "elementwise": (5, _templates(ELEMENTWISE)),
    "masks": (4, (*_templates(MASKS), "{mask} | {mask}")),
    "products": (4, _templates(PRODUCTS)),
    "views": (4, _templates(VIEWS)),
    "indexing": (2, _templates(INDEXING)),
    "reductions": (2, _templates(REDUCTIONS)),
    "constants": (2, _templates(CONSTANTS)),
    "in place": (1.5, _templates(INPLACE)),
    "writes": (1, _templates(WRITES)),
    "gradients": (1, _templates(GRADIENTS)),
    "almost MGLU": (1.5, _templates(ALMOST)),
}
DATA_DEPENDENT_TEMPLATES = _templates(DATA_DEPENDENT)

CONSTANTS: dict[str, tuple[str, ...]] = {
    "number": (
        *("0", "1", "-1", "2", "0.5", "-0.5", "3", "0.1", "1e-3", "1e30", "0.0", "-0.0", "1.0", "True", "False"),
        *("math.inf", "-math.inf", "math.nan", "math.pi", "scale", "count", "2**31"),
    ),
    "exponent": (
        *("2", "3", "4", "5", "7", "0", "-1", "-2", "0.5", "2.0", "-0.5", "1", "100", "True", "scale", "count"),
        *("math.inf", "-math.inf", "math.nan", "1e300", "2**40"),
    ),
    "act": ("F.silu", "F.gelu", "F.relu", "torch.sigmoid", "torch.tanh", "", "F.mish", "torch.exp"),
    "rounding": ('"floor"', '"trunc"', "None"),
    "flag": ("True", "False"),
    "size": ("1", "2", "3", "4", "5"),
    "dtype": (
        *("torch.float32", "torch.float64", "torch.bfloat16", "torch.float16", "torch.complex64"),
        *("torch.int64", "torch.int32", "torch.int8", "torch.uint8", "torch.bool"),
    ),
}


MOST_NUMBERS = 4096
"""A program's tensors have at most this many elements."""


@dataclass(frozen=True)
class Program(SourceProgram):
    dtype: torch.dtype = torch.float32
    square: bool = False
    """True if all sizes are equal, so that shapes do not reveal a transpose."""
    empty: bool = False
    """True if there are no tokens."""
    trained: bool = False
    surrounding: str = "nothing"
    """The context in which the program runs: a key of `SURROUNDINGS`."""
    dynamic: bool = False
    data_dependent: bool = False
    assume_binary: bool = False

    @property
    def arguments(self) -> list[str]:
        return list(self.inputs())

    @property
    def returned(self) -> tuple[str, ...]:
        """The variables that no other line reads."""
        definitions = {name: statement for statement in self.statements for name in assigned(statement)}

        def is_read(name: str) -> bool:
            others = [text for other, text in definitions.items() if other != name]
            return any(re.search(rf"\b{name}\b", text) for text in others)

        return tuple(name for name in definitions if not is_read(name)) or tuple(definitions)[-1:]

    def inputs(self) -> dict[str, Any]:
        source = "\n".join(self.statements)
        return {name: value for name, value in self.all_inputs().items() if re.search(rf"\b{name}\b", source)}

    def all_inputs(self) -> dict[str, Any]:
        """The tensors of a small model: tokens, images, weights, masks of every kind, indices, and two numbers."""
        generator = torch.Generator().manual_seed(self.seed)
        tokens, d, h = (4, 4, 4) if self.square else (3, 5, 4)
        tokens = 0 if self.empty else tokens

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.dtype)

        def integers(high: int, *shape: int) -> Tensor:
            return torch.randint(0, high, shape, generator=generator)

        named = {
            "x": normal(tokens, h),
            "X": normal(2, tokens, h),
            "W": normal(d, h),
            "V": normal(d, h),
            "L": normal(d, h),
            "S": normal(3, d, h),
            "b": normal(d),
            "r": normal(tokens, 1).sigmoid(),
            "m": normal(d, h) > 0,
            "M": normal(3, d, h) > 0,
            "f": integers(2, d, h).to(self.dtype),
            "i": integers(2, d, h),
            "u": integers(200, d, h).to(torch.uint8),
            "image": normal(2, 3, 6, 6),
            "kernel": normal(4, 3, 3, 3),
            "index": integers(3, tokens),
            "z": torch.complex(normal(tokens, h).float(), normal(tokens, h).float()),
            "t": normal(1)[0],
        }
        for name in ("x", "X", "W", "V", "L", "S", "b", "r", "kernel", "z", "t"):
            named[name].requires_grad_(self.trained and random.Random(f"{self.seed}{name}").random() < 0.6)
        return {**named, "scale": 0.375, "count": 2}

    def surroundings(self) -> AbstractContextManager[Any]:
        return SURROUNDINGS[self.surrounding]()

    def configuration(self) -> AbstractContextManager[Any]:
        return torch._dynamo.config.patch(
            capture_dynamic_output_shape_ops=self.data_dependent, capture_scalar_outputs=self.data_dependent
        )


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


# --- Drawing programs ------------------------------------------------------------------------------------------------


def draw(seed: int) -> Program:
    """The program of a seed."""
    dice = random.Random(seed)
    program = Program(
        seed,
        statements=(),
        dtype=dice.choices([torch.float32, torch.float64, torch.bfloat16, torch.float16], [12, 3, 2, 1])[0],
        square=dice.random() < 0.3,
        empty=dice.random() < 0.07,
        trained=dice.random() < 0.6,
        surrounding=dice.choices(list(SURROUNDINGS), [8, 1, 1])[0],
        dynamic=dice.random() < 0.3,
        data_dependent=dice.random() < 0.25,
        assume_binary=dice.random() < 0.3,
    )
    space: dict[str, Any] = {**NAMES, **program.all_inputs()}
    length = dice.randint(3, 12)
    statements: list[str] = []
    for _ in range(10 * length):
        if len(statements) == length:
            break
        statement = _statement(dice, program, space, name=f"v{len(statements)}")
        if statement is not None and _runs(statement, space, program):
            statements.append(statement)
    if not any(map(assigned, statements)):
        statements.append("v0 = x + 1")
    return replace(program, statements=tuple(statements))


def _statement(dice: random.Random, program: Program, space: dict[str, Any], name: str) -> str | None:
    """A line, sometimes in a `with` statement, or None if no tensor fits a field of the template."""
    kinds = [*TEMPLATES, "data-dependent"]
    weights = [weight for weight, _ in TEMPLATES.values()]
    kind = dice.choices(kinds, [*weights, 4 if program.data_dependent else 0])[0]
    template = dice.choice(DATA_DEPENDENT_TEMPLATES if kind == "data-dependent" else TEMPLATES[kind][1])
    try:
        line = template.format_map(_Fields(dice, space, name))
    except LookupError:
        return None
    line = line if kind == "writes" else f"{name} = {line}"
    block = dice.choices(
        ["", "with torch.no_grad():", "with torch.autocast('cpu', dtype=torch.bfloat16):", "with torch.enable_grad():"],
        [30, 2, 1, 0.5],
    )[0]
    return f"{block} {line}".strip()


def _runs(statement: str, space: dict[str, Any], program: Program) -> bool:
    """Run a line in `space`. Returns True if torch raises no error and the results are tensors of a moderate size."""
    names = assigned(statement)
    with program.surroundings():
        try:
            exec(statement, space)
        except Exception:
            return False
    made = [space[name] for name in names]
    if all(isinstance(value, Tensor) and value.numel() <= MOST_NUMBERS and value.dim() <= 6 for value in made):
        return True
    for name in names:
        del space[name]
    return False


class _Fields(dict[str, str]):
    """The fields of one template. Each is filled when it is first read."""

    def __init__(self, dice: random.Random, space: dict[str, Any], name: str) -> None:
        super().__init__(name=name)
        self._dice = dice
        self._tensors = {name: value for name, value in space.items() if isinstance(value, Tensor)}
        self._first: Tensor | None = None

    def __missing__(self, field: str) -> str:
        if field in CONSTANTS:
            return self._dice.choice(CONSTANTS[field])
        if field in ("dim", "order"):
            return self._dimensions(field)
        fits, first = _KINDS[field], self._first
        names = [name for name, tensor in self._tensors.items() if fits(tensor, tensor if first is None else first)]
        if not names:
            raise LookupError(field)
        recent = [name for name in names if re.fullmatch(r"v\d+", name)][-4:]
        name = self._dice.choice(recent if recent and self._dice.random() < 0.6 else names)
        if first is None:
            self._first = self._tensors[name]
            self["same"] = name
        return name

    def _dimensions(self, field: str) -> str:
        count = 2 if self._first is None else self._first.dim()
        if field == "order":
            return ", ".join(str(dim) for dim in self._dice.sample(range(count), count))
        return str(self._dice.randrange(-count, count)) if count else "0"


def _broadcasts(tensor: Tensor, first: Tensor) -> bool:
    pairs = zip(reversed(tensor.shape), reversed(first.shape), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


# Kind of field -> function of a tensor and the template's first tensor that returns True if the tensor fits.
_KINDS: dict[str, Callable[[Tensor, Tensor], bool]] = {
    "any": lambda t, first: True,
    "real": lambda t, first: t.is_floating_point(),
    "complex": lambda t, first: t.is_complex(),
    "int": lambda t, first: not t.is_floating_point() and not t.is_complex() and t.dtype is not torch.bool,
    "mask": lambda t, first: t.dtype is torch.bool and _broadcasts(t, first),
    "matrix": lambda t, first: t.is_floating_point() and t.dim() == 2,
    "batch": lambda t, first: t.is_floating_point() and t.dim() == 3,
    "image": lambda t, first: t.is_floating_point() and t.dim() == 4,
    "like": _broadcasts,
    "twin": lambda t, first: t.shape == first.shape,
    "weight": lambda t, first: t.is_floating_point() and t.dim() == 2 and t.shape[-1:] == first.shape[-1:],
    "right": lambda t, first: t.is_floating_point() and t.dim() >= 2 and t.shape[-2:-1] == first.shape[-1:],
}
