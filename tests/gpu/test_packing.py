"""Packing masks and logits on a GPU gives the same bits as on the CPU, for any strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mglu_ops.backends import BACKENDS
from tests.support.layers import rows_apart, unaligned

pytestmark = pytest.mark.gpu

Shape = tuple[int, int, int]
Layout = Callable[[Tensor], Tensor]
SPECIAL = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 6e-8, -6e-8)
SHAPES = [(1, 1, 1), (3, 5, 7), (4, 64, 256), (16, 33, 129), (2, 130, 24), (8, 3, 4096), (5, 17, 8)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def logits(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(shape).to(dtype)
    special = torch.tensor(SPECIAL, dtype=dtype)[torch.randint(len(SPECIAL), shape)]
    return torch.where(torch.rand(shape) < 0.2, special, values)


layouts = pytest.mark.parametrize(
    "laid_out", [torch.clone, lambda tensor: tensor.mT.contiguous().mT, unaligned, rows_apart]
)


@layouts
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_matches_the_cpu(shape: Shape, dtype: torch.dtype, laid_out: Layout) -> None:
    host = logits(shape, dtype)
    expected = torch.ops.mglu.pack_masks(host > 0)
    device = laid_out(host.cuda())
    assert BACKENDS["cuda"].can_pack(device) == (dtype is not torch.float64)
    assert torch.equal(torch.ops.mglu.pack_logits(device).cpu(), expected)
    masks = laid_out(host.cuda() > 0)
    assert BACKENDS["cuda"].can_pack(masks)
    assert torch.equal(torch.ops.mglu.pack_masks(masks).cpu(), expected)
    assert torch.equal(torch.ops.mglu.unpack_masks(torch.ops.mglu.pack_masks(masks), shape[2]), host.cuda() > 0)


@layouts
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_byte_of_a_bool_but_0_is_true(shape: Shape, laid_out: Layout) -> None:
    octets = torch.randint(0, 256, shape, dtype=torch.uint8)
    octets[torch.rand(shape) < 0.4] = 0
    viewed = laid_out(octets.cuda()).view(torch.bool)
    assert BACKENDS["cuda"].can_pack(viewed)
    assert torch.equal(torch.ops.mglu.pack_masks(viewed).cpu(), torch.ops.mglu.pack_masks(octets != 0))


@pytest.mark.parametrize("shape", [(2, 0, 9), (2, 3, 0), (1, 0, 0)])
def test_empty_masks(shape: Shape) -> None:
    packed = torch.ops.mglu.pack_logits(torch.zeros(shape, device="cuda"))
    assert packed.shape == (shape[1], -(-shape[2] // 8), shape[0])


def test_packing_in_a_cuda_graph_reads_current_masks() -> None:
    source = torch.randn(4, 64, 128, device="cuda")
    torch.ops.mglu.pack_logits(source)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = torch.ops.mglu.pack_logits(source)
    for _ in range(3):
        source.normal_()
        graph.replay()
        assert torch.equal(packed, torch.ops.mglu.pack_masks(source > 0))


def test_more_than_2_to_the_31_elements() -> None:
    source = torch.zeros(2, 1 << 15, (1 << 15) + 8, dtype=torch.bool, device="cuda")
    source[1, -1, -3:] = True
    packed = torch.ops.mglu.pack_masks(source)
    assert packed[-1, -1].tolist() == [0, 0b11100000]
    assert int(packed.sum()) == 0b11100000
