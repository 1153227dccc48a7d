"""Launches the kernels: derives their arguments and constants from the strides and alignments of the tensors."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import torch
from torch import Tensor

from ...given import Given
from ...masks import n_masks_of
from .configs import Config, MatvecConfig, choose
from .matmul import matmul_kernel
from .matvec import matvec_kernel


def _in_units(stride: int, limit: int) -> tuple[int, int]:
    """Return `(stride // unit, unit)`, where unit is the largest power of two up to `limit` that divides `stride`."""
    unit = gcd(stride, limit)
    return stride // unit, unit


def _tail(in_features: int, step: int) -> int:
    """Return 0 if a row is a whole number of steps, 1 if it is a whole number of groups of 8 columns, else 2."""
    if in_features % step == 0:
        return 0
    return 1 if in_features % 8 == 0 else 2


def _word_bytes(packed_masks: Tensor) -> int:
    """The size in bytes, up to 8, of the widest word in which the mask bytes of 8 weights can be read."""
    row, group, mask = packed_masks.stride()
    if mask != 1:
        return 1
    # A traced tensor has no address. Inductor assumes that storages are aligned, so the storage offset decides.
    address = packed_masks.storage_offset() if _is_traced(packed_masks) else packed_masks.data_ptr()
    return gcd(gcd(n_masks_of(packed_masks), 8), gcd(gcd(row, group), address))


def _is_traced(tensor: Tensor) -> bool:
    return type(tensor) not in (Tensor, torch.nn.Parameter)


def launch(given: Given, config: Config | None) -> Tensor:
    """Return y `[tokens, out_features]`. `given` is a result of `Given.in_rows`, so x is two-dimensional.

    `config` overrides the chosen launch configuration. One kernel runs, and only the result is allocated.
    """
    x, weight, packed_masks, activation, mask_weights, scale, weight_format, *_ = given
    assert scale is None or scale.dim() == 1, f"the scales of {weight_format} are not of whole rows"
    tokens, in_features, out_features, n_masks = x.shape[0], given.in_features, given.out_features, given.n_masks
    if x.is_cuda and not _is_traced(x) and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):  # Triton launches on the current device
            return launch(given, config)
    y = x.new_empty(tokens, out_features)
    if y.numel() == 0:
        return y
    if in_features == 0:
        return y.zero_()
    config = config or choose(n_masks, tokens, wide=x.dtype is torch.float32)
    run = _matvec if isinstance(config, MatvecConfig) else _matmul
    wrap: Callable[[Any], Any] = torch.library.wrap_triton if _is_traced(x) else lambda kernel: kernel
    run(
        wrap,
        config,
        (x, weight, packed_masks, mask_weights, scale, y, tokens, out_features, in_features),
        (
            x.stride(),
            weight.stride(),
            packed_masks.stride(),
            (0, 0) if mask_weights is None else mask_weights.stride(),
        ),
        {
            "N_MASKS": n_masks,
            "ACTIVATION": activation,
            "WEIGHTED": mask_weights is not None,
            "SCALED": scale is not None,
        },
    )
    return y


def _matvec(wrap: Any, config: Any, problem: tuple[Any, ...], strides: Any, constants: dict[str, Any]) -> None:
    packed_masks, tokens, out_features, in_features = problem[2], *problem[-3:]
    (x_token, x_k), (w_row, w_k), (m_row, m_group, m_mask), mask_weight_strides = strides
    word = _word_bytes(packed_masks)
    w_row, w_unit = _in_units(w_row, 8)
    wrap(matvec_kernel)[(tokens * out_features,)](
        *problem,
        x_token,
        x_k,
        w_row,
        w_k,
        m_row // word,
        m_group // word,
        m_mask,
        *mask_weight_strides,
        **constants,
        WORD_BYTES=word,
        W_UNIT=w_unit,
        TAIL=_tail(in_features, 8 * config.groups),
        GROUPS=config.groups,
        num_warps=config.num_warps,
        num_stages=1,
    )


def _matmul(wrap: Any, config: Any, problem: tuple[Any, ...], strides: Any, constants: dict[str, Any]) -> None:
    packed_masks, tokens, out_features, in_features = problem[2], *problem[-3:]
    (x_token, x_k), (w_row, w_k), (m_row, m_group, m_mask), mask_weight_strides = strides
    n_masks = n_masks_of(packed_masks)
    masks = 1 << (n_masks - 1).bit_length()
    (x_token, x_unit), (w_row, w_unit), (m_row, m_unit) = (
        _in_units(x_token, 8),
        _in_units(w_row, 16 // problem[1].itemsize),
        _in_units(m_row, 16),
    )
    row_blocks, token_blocks = -(-out_features // config.block_rows), -(-tokens // config.block_tokens)
    wrap(matmul_kernel)[(row_blocks * token_blocks,)](
        *problem,
        x_token,
        x_k,
        w_row,
        w_k,
        m_row,
        m_group,
        m_mask,
        *mask_weight_strides,
        **constants,
        MASKS=masks,
        X_UNIT=x_unit,
        W_UNIT=w_unit,
        M_UNIT=m_unit,
        DENSE=masks == n_masks and m_mask == 1 and m_group == n_masks,
        TAIL=_tail(in_features, config.block_k),
        BLOCK_ROWS=config.block_rows,
        BLOCK_K=config.block_k,
        BLOCK_TOKENS=config.block_tokens,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
