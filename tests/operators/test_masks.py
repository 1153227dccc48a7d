"""The packed format: the position of each bit, unpacking, and the tensors that are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mglu_ops import masks as packing
from mglu_ops.backends import BACKENDS, cpu
from mglu_ops.nn import MGLU
from tests.support import layers as s

mglu = torch.ops.mglu
pack, unpack = mglu.pack_masks, mglu.unpack_masks

MASK_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


def random_masks(shape: tuple[int, ...], seed: int, density: float = 0.5) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density


@given(s.n_masks, s.out_features, s.in_features, s.layouts, st.sampled_from(MASK_DTYPES), s.seeds)
def test_unpacking_is_the_inverse_of_packing(n_masks, out_features, in_features, layout, dtype, seed):
    masks = s.laid_out(random_masks((n_masks, out_features, in_features), seed), layout)
    packed = pack(s.laid_out(masks.to(dtype), layout))
    assert packed.shape == (out_features, -(-in_features // 8), n_masks)
    assert packed.dtype is torch.uint8
    assert packed.is_contiguous()
    assert torch.equal(unpack(packed, in_features), masks)
    assert torch.equal(pack(masks[0]), pack(masks[:1]))  # a single mask may have two dimensions
    strided = s.laid_out(packed, layout)
    assert torch.equal(unpack(strided, in_features), unpack(strided.contiguous(), in_features))
    packing.check_packed_masks(packed, in_features, out_features)


REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SPECIAL = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 6e-8, -6e-8)


@given(s.n_masks, s.out_features, s.in_features, s.layouts, st.sampled_from(REAL), s.seeds)
def test_logits_are_packed_by_their_sign(n_masks, out_features, in_features, layout, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n_masks, out_features, in_features, generator=generator).to(dtype)
    chosen = torch.rand(logits.shape, generator=generator) < 0.2
    special = torch.tensor(SPECIAL, dtype=dtype)[torch.randint(len(SPECIAL), logits.shape, generator=generator)]
    logits = s.laid_out(torch.where(chosen, special, logits), layout)
    expected = packing.pack(logits > 0)
    packed = torch.ops.mglu.pack_logits(logits)
    assert torch.equal(packed, expected)
    assert packed.is_contiguous()
    for source in (logits, logits > 0):  # call the kernels, which the operators use only for larger masks
        if BACKENDS["cpu"].can_pack(source):
            assert torch.equal(BACKENDS["cpu"].pack(source), expected)


def test_the_kernels_pack_large_masks_as_torch_does():
    logits = torch.randn(3, 513, 1029)
    expected = packing.pack(logits > 0)
    for source in (logits, logits.bfloat16(), logits.half(), logits > 0):
        assert source.dtype is torch.bool or BACKENDS["cpu"].can_pack(source) or cpu.isa(source.dtype, 1, 3) is None
        packed = mglu.pack_masks(source) if source.dtype is torch.bool else mglu.pack_logits(source)
        assert torch.equal(packed, packing.pack(source > 0) if source.is_floating_point() else expected)


@pytest.mark.parametrize("shape", [(1, 3, 8), (2, 5, 21), (3, 1, 7), (4, 256, 512), (3, 513, 1029)])
def test_any_byte_of_a_bool_but_0_is_true(shape):
    """A uint8 tensor that is viewed as bool may hold any byte. Kernels pack the larger shapes, and torch the others."""
    generator = torch.Generator().manual_seed(0)
    octets = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    octets[torch.rand(shape, generator=generator) < 0.4] = 0
    expected = packing.pack(octets != 0)
    for source in (octets, octets.mT.contiguous().mT, octets.permute(2, 0, 1).contiguous().permute(1, 2, 0)):
        viewed = source.view(torch.bool)
        assert torch.equal(pack(viewed), expected)
        assert torch.equal(packing.pack(viewed), expected)
        if BACKENDS["cpu"].can_pack(viewed):
            assert torch.equal(BACKENDS["cpu"].pack(viewed), expected)
    single = octets[0].view(torch.bool)
    assert torch.equal(pack(single), expected[:, :, :1])
    assert torch.equal(packing.pack(single.expand(2, -1, -1)), expected[:, :, :1].expand(-1, -1, 2))


@given(s.n_masks, st.integers(1, 3), st.integers(1, 20), s.seeds)
def test_each_bit_has_the_position_of_the_format(n_masks, out_features, in_features, seed):
    masks = random_masks((n_masks, out_features, in_features), seed)
    packed, truth = pack(masks).tolist(), masks.tolist()
    for r in range(out_features):
        for byte in range(len(packed[r])):
            for i in range(n_masks):
                bits = [truth[i][r][k] if k < in_features else False for k in range(8 * byte, 8 * byte + 8)]
                assert packed[r][byte][i] == sum(1 << position for position, bit in enumerate(bits) if bit)


@pytest.mark.parametrize("shape", [(2, 0, 9), (2, 3, 0), (1, 0, 0)])
def test_empty_masks_can_be_packed_and_unpacked(shape):
    masks = torch.zeros(shape, dtype=torch.bool)
    packed = pack(masks)
    packing.check_packed_masks(packed, shape[2], shape[1])
    assert torch.equal(unpack(packed, shape[2]), masks)


@pytest.mark.parametrize("used", range(1, 8))
def test_every_padding_bit_must_be_zero(used):
    in_features = 8 + used
    for bit in range(8):
        packed = pack(random_masks((3, 4, in_features), 0))
        packed[bit % 4, 1, used % 3] |= 1 << bit
        if bit < used:
            packing.check_packed_masks(packed, in_features)
        else:
            with pytest.raises(ValueError, match=rf"packed_masks: padding bits past in_features={in_features}"):
                packing.check_packed_masks(packed, in_features)


@pytest.mark.parametrize("in_features", [-1, -(2**63)])
@pytest.mark.parametrize("width", [0, 1])
def test_a_negative_number_of_columns_is_refused(in_features, width):
    torch._dynamo.reset()
    packed = torch.zeros(4, width, 2, dtype=torch.uint8)
    compiled = torch.compile(unpack, backend="eager", fullgraph=True, dynamic=False)
    for call in (unpack, packing.check_packed_masks, compiled):
        with pytest.raises(Exception, match=f"in_features: got {in_features}, must be at least 0"):
            call(packed, in_features)


PACKED_DTYPES = (torch.uint8, torch.int8, torch.int64, torch.float32, torch.bool, torch.complex64)


@st.composite
def packed_tensors(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """Draw a tensor, in_features and out_features. Often they are valid packed masks of a layer of this size."""
    in_features, out_features, n_masks = draw(st.integers(1, 20)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    shape = [out_features, (in_features + 7) // 8, n_masks]
    if draw(st.booleans()):
        shape = draw(st.lists(st.integers(0, 20), max_size=4))
    dtype = draw(st.sampled_from(PACKED_DTYPES)) if draw(st.booleans()) else torch.uint8
    seed = draw(st.integers(0, 1000))
    values = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    used = in_features % 8
    if used and draw(st.booleans()) and len(shape) == 3 and shape[1]:
        values[:, -1, :] &= (1 << used) - 1
    packed = values.to(dtype)
    if draw(st.booleans()) and packed.dim() == 3:
        packed = packed.transpose(0, 2).contiguous().transpose(0, 2)
    return packed, in_features, out_features


def is_valid(packed: Tensor, in_features: int, out_features: int) -> bool:
    """A second implementation of `check_packed_masks`, bit by bit."""
    if packed.dtype is not torch.uint8 or packed.dim() != 3:
        return False
    rows, width, n_masks = packed.shape
    if rows != out_features or not width * 8 - 8 < in_features <= width * 8 or n_masks not in range(1, 17):
        return False
    bits = [[[byte >> k & 1 for k in range(8)] for byte in column] for column in packed[:, -1, :].tolist()]
    first_padding = in_features - 8 * (width - 1)
    return not any(any(byte[first_padding:]) for row in bits for byte in row)


@given(packed_tensors())
def test_packed_masks_are_loaded_if_and_only_if_they_are_valid(case: tuple[Tensor, int, int]) -> None:
    packed, in_features, out_features = case
    layer = MGLU(in_features, out_features, n_masks=packed.shape[2] if is_valid(*case) else 2, learnable_masks=False)
    before = layer.packed_masks.clone()
    state = {"weight": torch.ones(out_features, in_features), "packed_masks": packed}
    if is_valid(*case):
        layer.load_state_dict(state)
        assert torch.equal(layer.packed_masks, packed)
        assert layer(torch.ones(2, in_features)).isfinite().all()
    else:
        with pytest.raises(RuntimeError, match="packed_masks"):
            layer.load_state_dict(state)
        assert torch.equal(layer.packed_masks, before)
        with pytest.raises((TypeError, ValueError), match="packed_masks"):
            packing.check_packed_masks(packed, in_features, out_features)
