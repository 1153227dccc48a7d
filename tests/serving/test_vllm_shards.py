"""The shards of all tensor-parallel ranks make up the checkpoint, and wrong tensors are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mglu_ops.formats import FORMATS
from mglu_ops.nn import MGLUExpertsFeedForward, MGLUFeedForward
from mglu_ops.vllm.shards import (
    Part,
    copy_shards,
    down_scale_shard,
    down_shard,
    packed_shard,
    packed_shard_of_logits,
    rows_of_rank,
    scale_shard,
    weight_shard,
)

N_MASKS, ROWS, COLUMNS = 3, 12, 20


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """A weight, logits, and the packed masks of the logits."""
    torch.manual_seed(0)
    logits = torch.randn(N_MASKS, ROWS, COLUMNS)
    return torch.randn(ROWS, COLUMNS), logits, torch.ops.mglu.pack_logits(logits)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_shards_of_all_ranks_are_the_checkpoint(ranks: int) -> None:
    weight, logits, packed = tensors()
    masks = (N_MASKS, ROWS, COLUMNS)
    each = range(ranks)
    assert torch.equal(torch.cat([weight_shard(weight, ROWS, COLUMNS, rank, ranks) for rank in each]), weight)
    assert torch.equal(torch.cat([packed_shard(packed, *masks, rank, ranks) for rank in each]), packed)
    assert torch.equal(torch.cat([packed_shard_of_logits(logits, *masks, rank, ranks) for rank in each]), packed)


def test_ranks_add_up_to_the_whole_layer() -> None:
    """As in vLLM, each rank computes its output features of MGLU, and the row-parallel projection sums over ranks."""
    torch.manual_seed(0)
    layer, x, ranks = MGLUFeedForward(COLUMNS, ROWS, n_masks=N_MASKS).double(), torch.randn(5, COLUMNS).double(), 2
    weight, logits = layer.mglu.weight.detach(), layer.mglu.mask_logits.detach()
    total = torch.zeros(5, COLUMNS, dtype=torch.float64)
    for rank in range(ranks):
        packed = packed_shard_of_logits(logits, N_MASKS, ROWS, COLUMNS, rank, ranks)
        columns = torch.ops.mglu.forward(x, weight_shard(weight, ROWS, COLUMNS, rank, ranks), packed, "silu")
        total += columns @ layer.down_proj.weight.detach()[:, rows_of_rank(ROWS, rank, ranks)].T
    torch.testing.assert_close(total, layer(x).detach())


@pytest.mark.parametrize(
    ("weight_format", "rows", "ranks"),
    [("fp8_row", 12, 4), ("int8_row", 12, 2), ("int4_group", 12, 3), ("fp8_block", 512, 2), ("fp8_block", 300, 1)],
)
def test_the_shards_of_a_quantized_weight_are_its_rows(weight_format: str, rows: int, ranks: int) -> None:
    """A shard and its scales dequantize to the rank's rows of the whole weight."""
    chosen, columns = FORMATS[weight_format], 260
    torch.manual_seed(0)
    stored, scale = chosen.quantize(torch.randn(rows, columns) * torch.linspace(1, 9, rows)[:, None])
    assert scale is not None
    whole = chosen.dequantize(stored, scale, torch.float32)
    for rank in range(ranks):
        place = (rows, columns, rank, ranks, weight_format)
        weight, scales = weight_shard(stored, *place), scale_shard(scale, *place)
        assert scales.shape == chosen.scale_shape(rows // ranks, columns)
        assert torch.equal(chosen.dequantize(weight, scales, torch.float32), whole[rows_of_rank(rows, rank, ranks)])


@pytest.mark.parametrize("weight_format", [name for name in FORMATS if name != "dense"])
def test_the_shards_of_a_quantized_down_projection_are_its_columns(weight_format: str) -> None:
    chosen, sizes, ranks = FORMATS[weight_format], (20, 512), 2
    torch.manual_seed(0)
    stored, scale = chosen.quantize(torch.randn(sizes) * torch.linspace(1, 9, 512))
    assert scale is not None
    whole = chosen.dequantize(stored, scale, torch.float32)
    for rank in range(ranks):
        place = (*sizes, rank, ranks, weight_format)
        weight, scales = down_shard(stored, *place), down_scale_shard(scale, *place)
        assert scales.shape == chosen.scale_shape(20, 256)
        assert torch.equal(chosen.dequantize(weight, scales, torch.float32), whole.chunk(ranks, 1)[rank])


@pytest.mark.parametrize("by_experts", [False, True])
def test_ranks_add_up_to_the_whole_mixture(by_experts: bool) -> None:
    """Each rank computes some rows of every expert, or all rows of some experts, which it numbers from 0."""
    torch.manual_seed(0)
    experts, ranks = 4, 2
    block = MGLUExpertsFeedForward(experts, COLUMNS, ROWS, 2, n_masks=N_MASKS).double()
    x = torch.randn(5, COLUMNS).double()
    weight, logits = block.experts.weight.detach(), block.experts.mask_logits.detach()
    expert_weights, ids = block.gate(x).detach().softmax(-1).topk(2)
    expert_weights = expert_weights / expert_weights.sum(-1, keepdim=True)
    total = torch.zeros(5, COLUMNS, dtype=torch.float64)
    for rank in range(ranks):
        part = Part.of_experts(experts, rank, ranks, by_experts)
        place = (ROWS, COLUMNS, part.rank, part.ranks)
        own = torch.stack([weight_shard(layer, *place) for layer in part.layers("weight", weight)])
        masks = [packed_shard_of_logits(layer, N_MASKS, *place) for layer in part.layers("mask_logits", logits)]
        assert part.leading == own.shape[:1] == ((experts // ranks if by_experts else experts),)
        own_ids = ids - part.experts.start
        y = torch.ops.mglu.experts_forward(x, own, torch.stack(masks), own_ids, "silu")
        layers = part.layers("weight", block.down_proj.weight.detach())
        down = torch.stack([down_shard(layer, COLUMNS, ROWS, part.rank, part.ranks) for layer in layers])
        total += torch.ops.mglu.experts_down(y, down, own_ids, expert_weights)
    torch.testing.assert_close(total, block(x).detach())


def corrupt(packed: Tensor) -> Tensor:
    damaged = packed.clone()
    damaged[ROWS - 1, -1, 0] |= 0x80
    return damaged


SHAPE = (ROWS, COLUMNS)
RANK = (0, 2)
EXPERTS = Part.of_experts(4, *RANK, False)
SCALES = torch.ones(ROWS)
BLOCKS = torch.zeros(320, COLUMNS, dtype=torch.float8_e4m3fn)
WRONG: list[tuple[Callable[[Tensor, Tensor, Tensor], object], type[Exception], str]] = [
    (lambda w, l, p: weight_shard(w.T, *SHAPE, *RANK), ValueError, r"weight: got shape \[20, 12\], must be \[12, 20\]"),
    (
        lambda w, l, p: weight_shard(w, *SHAPE, 0, 5),
        ValueError,
        "intermediate_size: got 12, must be a multiple of .* 5",
    ),
    (lambda w, l, p: weight_shard(w.long(), *SHAPE, *RANK), TypeError, r"weight: got dtype torch\.int64, must be one"),
    (
        lambda w, l, p: weight_shard(w, *SHAPE, *RANK, "fp8_row"),
        TypeError,
        "weight: got dtype torch.float32, must be one of torch.float8_e4m3fn for the weight_format fp8_row",
    ),
    (
        lambda w, l, p: weight_shard(BLOCKS, 320, COLUMNS, *RANK, "fp8_block"),
        ValueError,
        "intermediate_size: got 320, must be a multiple of 256 with 2 ranks and a weight in fp8_block",
    ),
    (
        lambda w, l, p: scale_shard(SCALES[1:], *SHAPE, *RANK, "fp8_row"),
        ValueError,
        r"weight_scale: got shape \[11\], must be \[12\] for fp8_row",
    ),
    (
        lambda w, l, p: scale_shard(SCALES.half(), *SHAPE, *RANK, "fp8_row"),
        TypeError,
        r"weight_scale: got dtype torch\.float16, must be torch\.float32",
    ),
    (
        lambda w, l, p: scale_shard(SCALES, *SHAPE, *RANK, "dense"),
        ValueError,
        "weight_scale: got the scales of a quantized weight, but the config says that it is dense",
    ),
    (lambda w, l, p: weight_shard(w, *SHAPE, 2, 2), ValueError, "rank: got 2, must be from 0 to 1"),
    (lambda w, l, p: packed_shard(p, 4, *SHAPE, *RANK), ValueError, "packed_masks: got n_masks=3, must be 4"),
    (lambda w, l, p: packed_shard(p.float(), 3, *SHAPE, *RANK), TypeError, "packed_masks: got dtype torch.float32"),
    (lambda w, l, p: packed_shard(p[:6], 3, *SHAPE, *RANK), ValueError, r"packed_masks: got shape \[6, 3, 3\]"),
    (lambda w, l, p: packed_shard(corrupt(p), 3, *SHAPE, 1, 2), ValueError, "packed_masks: .*padding"),
    (
        lambda w, l, p: packed_shard_of_logits(l[:2], 3, *SHAPE, *RANK),
        ValueError,
        r"mask_logits: got shape \[2, 12, 20\]",
    ),
    (
        lambda w, l, p: Part.of_experts(5, 0, 2, True),
        ValueError,
        "num_experts: got 5, must be a multiple of the number of ranks, 2",
    ),
    (
        lambda w, l, p: EXPERTS.layers("weight", w),
        ValueError,
        r"weight: got shape \[12, 20\], must be \[num_experts=4, \.\.\.\]",
    ),
    (lambda w, l, p: down_shard(w.T, *SHAPE, *RANK), ValueError, r"weight: got shape \[20, 12\], must be \[12, 20\]"),
    (lambda w, l, p: down_shard(w.byte(), *SHAPE, *RANK), TypeError, r"weight: got dtype torch\.uint8"),
    (
        lambda w, l, p: down_shard(BLOCKS.T, COLUMNS, 320, *RANK, "fp8_block"),
        ValueError,
        "intermediate_size: got 320, must be a multiple of 256 with 2 ranks and a weight in fp8_block, of which 128",
    ),
    (
        lambda w, l, p: down_scale_shard(SCALES[1:], *SHAPE, *RANK, "fp8_row"),
        ValueError,
        r"weight_scale: got shape \[11\], must be \[12\] for fp8_row",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=[message[:30] for *_, message in WRONG])
def test_wrong_tensors_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(*tensors())


@pytest.mark.parametrize("experts", [None, 1, 3])
def test_shards_are_copied_into_the_parameter_that_vllm_gives(experts: int | None) -> None:
    """In `reload_weights`, vLLM calls a parameter's loader with another parameter, and first with one on meta."""
    shards = [torch.randn(4, 5) for _ in range(experts or 1)]
    whole = shards[0] if experts is None else torch.stack(shards)
    for device in ("meta", "cpu"):
        parameter = torch.nn.Parameter(torch.zeros(whole.shape, device=device), requires_grad=False)
        copy_shards(parameter, shards)
    assert torch.equal(parameter, whole)
    if experts is not None:
        with pytest.raises(ValueError, match="argument 2 is"):
            copy_shards(parameter, shards[1:] or shards * 2)
