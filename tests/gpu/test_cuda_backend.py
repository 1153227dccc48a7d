"""The CUDA backend, compared with the float64 oracle: all kernels, odd shapes, strides, and repeated bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from mglu_ops import dispatch
from mglu_ops.activations import ACTIVATIONS
from mglu_ops.backends.cuda import DecodeMma, LaunchConfig, Plain, TileWgmma
from mglu_ops.formats import FORMATS
from tests.support.budgets import BUDGET, assert_matches, relative_error
from tests.support.calls import Problem, launch_of, unsupported
from tests.support.layers import every_stored_value, mask_major, rows_apart, spaced, stored_layer, transposed, unaligned

pytestmark = pytest.mark.gpu

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("n_masks", range(1, 17))
@pytest.mark.parametrize("sizes", [(1, 80, 512), (3, 80, 512), (20, 208, 544), (100, 208, 544)], ids=str)
def test_every_mask_count(sizes: tuple[int, int, int], n_masks: int) -> None:
    mask_weights_dtype = torch.float32 if n_masks % 3 == 0 and sizes[0] > 3 else None
    Problem(*sizes, n_masks, mask_weights_dtype=mask_weights_dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("sizes", [(1, 64, 256), (2, 64, 256), (300, 130, 288)], ids=str)
def test_every_activation_and_dtype(sizes: tuple[int, int, int], activation: str, dtype: torch.dtype) -> None:
    Problem(*sizes, 4, dtype, activation).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 16, 17, 33, 64])
@pytest.mark.parametrize("n_masks", [1, 4, 8, 16])
def test_token_counts(n_masks: int, tokens: int, dtype: torch.dtype) -> None:
    Problem(tokens, 96, 768, n_masks, dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("h", [1, 7, 8, 15, 40, 64, 72, 264, 520, 1000, 1001])
@pytest.mark.parametrize("d", [1, 15, 16, 17, 33, 130])
def test_ragged_shapes(d: int, h: int, dtype: torch.dtype) -> None:
    for tokens, n_masks in ((1, 1), (1, 3), (1, 8), (2, 2), (2, 16), (7, 5)):
        Problem(tokens, d, h, n_masks, dtype).check()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tokens", [9, 24, 65, 300, 1000])
@pytest.mark.parametrize("shape", [(64, 32), (65, 96), (130, 1056), (1001, 288), (2048, 512)], ids=str)
def test_many_tokens(shape: tuple[int, int], tokens: int, dtype: torch.dtype) -> None:
    for n_masks, activation in ((1, "silu"), (4, "gelu"), (8, "tanh"), (16, "silu")):
        Problem(tokens, *shape, n_masks, dtype, activation).check()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("n_masks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("shape", [(8192, 2048), (14336, 4096), (4096, 14336)])
def test_real_shapes(shape: tuple[int, int], n_masks: int, dtype: torch.dtype) -> None:
    for tokens in (1, 8, 2000) if shape[0] == 8192 else (1, 8):
        Problem(tokens, *shape, n_masks, dtype).check()


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("n_masks", [1, 6, 8, 16])
def test_a_row_does_not_depend_on_the_number_of_others(n_masks: int, permuted: bool) -> None:
    """With 41 or more tokens, the order of `tile_wgmma`'s sums depends only on the options `permuted` and `sparse`."""
    p = Problem(700, 2048, 1024, n_masks)
    x, everyone = p.x, {}
    for tokens in (700, 200, 41, 48, 64, 65, 128, 300, 699):
        p.x = x[:tokens]
        chosen = launch_of(*p.given).config
        result = p.run(chosen if chosen.sparse else replace(chosen, permuted=permuted))
        known = everyone.setdefault(chosen.sparse, result)
        rows = min(tokens, len(known))
        assert torch.equal(result[:rows], known[:rows]), tokens


TILES = (
    TileWgmma(rows=64, block_tokens=8, stages=3),
    TileWgmma(rows=112, block_tokens=16, stages=4, sub=2),
    TileWgmma(rows=80, block_tokens=24, stages=3, steps=2),
    TileWgmma(rows=64, block_tokens=64, mask_groups=2, stages=5, steps=2),
    TileWgmma(rows=128, block_tokens=16, mask_groups=2, stages=4, steps=2),
    TileWgmma(rows=128, block_tokens=48, passes=2, stages=3, steps=2),
    TileWgmma(rows=112, block_tokens=32, stages=3, sub=2, sparse=True),
    TileWgmma(rows=64, block_tokens=16, stages=4, sparse=True),
    TileWgmma(rows=128, block_tokens=24, stages=3, sparse=True),
    TileWgmma(rows=64, block_tokens=64, mask_groups=2, stages=3, sparse=True),
    TileWgmma(rows=64, block_tokens=32, mask_groups=2, passes=2, stages=3, sparse=True),
    TileWgmma(rows=64, block_tokens=32, mask_groups=2, passes=2, stages=3, steps=2),
    TileWgmma(rows=64, block_tokens=16, stages=4, cluster=2),
    TileWgmma(rows=112, block_tokens=24, stages=3, sub=2, cluster=2),
    TileWgmma(rows=128, block_tokens=16, mask_groups=2, stages=4, steps=2, cluster=2),
    TileWgmma(rows=128, block_tokens=48, passes=2, stages=3, steps=2, cluster=2),
    TileWgmma(rows=80, block_tokens=24, stages=4, sub=2, sparse=True, cluster=2),
)


@pytest.mark.parametrize(
    "config", [*TILES, *(replace(tile, permuted=True) for tile in TILES if not tile.sparse)], ids=str
)
def test_override_of_tiles(config: LaunchConfig) -> None:
    # TMA cannot load masks whose rows have 1032 bytes. With the last shape, a block computes several tiles. All shapes
    # have an odd number of tiles of tokens, so one block of a cluster has no tile.
    for tokens, d, h in ((6, 128, 64), (70, 1001, 1040), (70, 1001, 1032), (33, 20000, 528)):
        Problem(tokens, d, h, 8).check(config)
    if config.passes == 2:
        Problem(70, 1001, 1040, 16).check(config)
    elif config.sub == 2:
        Problem(70, 1001, 1152, 3).check(config)


@pytest.mark.parametrize("n_masks", [1, 4, 8])
@pytest.mark.parametrize("tokens", [20, 60])  # on Hopper, 20 tokens run sparse tiles, and 60 tokens dense tiles
def test_layouts_of_x_for_tiles(tokens: int, n_masks: int) -> None:
    """If rows of x overlap, or TMA cannot load them, x is permuted first. Rows with gaps are read in place."""
    p = Problem(tokens, 128, 256, n_masks)
    wide = torch.randn(tokens, 512, device="cuda", dtype=p.x.dtype)
    window = wide.flatten()[: tokens * 8 + 248].as_strided((tokens, 256), (8, 1))
    for p.x in (wide[:, 8:264], wide[:, 1:257], wide[:, ::2], window, wide[:1, :256].expand(tokens, 256)):
        assert_matches(p.run(), p.oracle(), p.x.dtype, str(p.x.stride()))


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="wgmma")
def test_a_launch_that_cannot_read_x_is_refused() -> None:
    p = Problem(40, 128, 256, 4)
    p.x = p.x.t().contiguous().t()
    with pytest.raises(ValueError, match=r"tile_wgmma\(.*\) needs rows of x that are aligned and do not overlap"):
        p.run(TILES[0])
    p.run(replace(TILES[0], permuted=True))


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("mask_weight", DTYPES)
def test_mask_weights(mask_weight: torch.dtype, dtype: torch.dtype, tokens: int) -> None:
    Problem(tokens, 48, 320, 6, dtype, mask_weights_dtype=mask_weight).check()
    strided = Problem(tokens, 48, 320, 6, dtype, mask_weights_dtype=mask_weight)
    assert strided.mask_weights is not None
    strided.mask_weights = torch.rand(6, tokens * 2, device="cuda").to(mask_weight)[:, ::2].t()
    strided.check()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("n_masks", [5, 6, 7, 8, 11, 12, 16])
@pytest.mark.parametrize("top_k", [0, 1, 2, 4, 5])
def test_top_k_mask_weights(top_k: int, n_masks: int, dtype: torch.dtype) -> None:
    for tokens in (1, 2, 5, 8, 20):
        p = Problem(tokens, 80, 544, n_masks, dtype)
        p.mask_weights = top_k_mask_weights(tokens, n_masks, top_k)
        p.check()


@pytest.mark.parametrize("n_masks", [6, 8, 16])
def test_a_row_does_not_depend_on_the_masks_that_others_weigh(n_masks: int) -> None:
    p = Problem(8, 2048, 1024, n_masks)
    x, mask_weight = p.x, top_k_mask_weights(8, n_masks, 2)
    p.mask_weights = mask_weight
    everyone = p.run()
    for tokens in (2, 3, 5):
        p.x, p.mask_weights = x[:tokens], mask_weight[:tokens]
        assert torch.equal(p.run(), everyone[:tokens]), tokens


def top_k_mask_weights(tokens: int, n_masks: int, top_k: int) -> Tensor:
    """Random weights for `top_k` random masks of each token, and 0 for its other masks."""
    weights = torch.rand(tokens, n_masks, device="cuda") + 0.1
    order = torch.rand(tokens, n_masks, device="cuda").argsort(-1)
    return torch.where(order < top_k, weights, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_strides_and_offsets(tokens: int, dtype: torch.dtype) -> None:
    p = Problem(tokens, 48 if tokens < 9 else 80, 256, 4, dtype)
    expected = p.oracle()
    layouts: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
        "x": (unaligned, partial(unaligned, offset=3), spaced, partial(rows_apart, distance=1), transposed),
        "weight": (unaligned, spaced, rows_apart, partial(rows_apart, distance=3), transposed),
        "packed_masks": (unaligned, partial(unaligned, offset=4), spaced, mask_major),
    }
    for name, changes in layouts.items():
        tensor = getattr(p, name)
        for change in changes:
            setattr(p, name, change(tensor))
            assert_matches(p.run(), expected, dtype, f"{name} {change}")
        setattr(p, name, tensor)


def test_empty() -> None:
    assert Problem(0, 32, 64, 2).run().shape == (0, 32)
    assert Problem(2, 0, 64, 2).run().shape == (2, 0)
    assert torch.equal(Problem(2, 32, 0, 2).run(), torch.zeros(2, 32, dtype=torch.float16, device="cuda"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 8, 100])
@pytest.mark.parametrize("n_masks", [1, 8, 16])
def test_same_bits_every_time(n_masks: int, tokens: int, dtype: torch.dtype) -> None:
    p = Problem(tokens, 1024, 1024, n_masks, dtype)
    first = p.run()
    assert all(torch.equal(p.run(), first) for _ in range(20))


@pytest.mark.parametrize("n_masks", [1, 8])
def test_a_row_does_not_depend_on_the_others(n_masks: int) -> None:
    """Tests batches of 1 to 8 tokens, which all have the same launch."""
    p = Problem(8, 256, 1024, n_masks)
    everyone = p.run()
    x = p.x
    for tokens in range(1, 8):
        p.x = x[:tokens]
        assert torch.equal(p.run(), everyone[:tokens])


@pytest.mark.parametrize("last", ["x", "weight", "packed_masks"])
@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_follows_the_producer_of_its_inputs(tokens: int, last: str) -> None:
    """The kernel may start while earlier kernels still write its inputs, and must not read the old values."""
    p = Problem(tokens, 4096, 4096, 4)
    expected = p.run()
    kept = {name: getattr(p, name).clone() for name in ("x", "weight", "packed_masks")}
    kept[last] = kept.pop(last)
    for _ in range(50):
        for name in kept:
            getattr(p, name).zero_()
        p.run()
        for name, tensor in kept.items():
            getattr(p, name).copy_(tensor)
        assert torch.equal(p.run(), expected)


@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_follows_an_mglu_launch_that_writes_its_weight(tokens: int) -> None:
    """The second kernel may start before the first one writes the weight, and must not prefetch the old weight."""
    p = Problem(tokens, 1024, 2048, 4)
    producer = Problem(1024, 2048, 1024, 1)
    seen = set()
    for _ in range(50):
        producer.x.normal_()
        p.weight = producer.run()  # in memory that held the weight of an earlier round
        seen.add(p.weight.data_ptr())
        result = p.run()
        torch.cuda.synchronize()
        assert torch.equal(result, p.run())
    assert len(seen) < 50


CONFIGS = (
    Plain(block_tokens=1),
    Plain(block_tokens=4),
    DecodeMma(tiles=3, sub=2, mask_group=8, block_tokens=8),
    DecodeMma(tiles=4, mask_group=8, block_tokens=8),
    DecodeMma(tiles=2, split_k=2, stages=3, sub=1, mask_group=8, block_tokens=8),
    DecodeMma(tiles=1, split_k=4, stages=2, sub=4, mask_group=4, block_tokens=16),
    DecodeMma(tiles=2, split_k=4, mask_group=8, block_tokens=2),
    DecodeMma(tiles=2, split_k=2, mask_group=8, block_tokens=8, cluster=2),
)


@pytest.mark.parametrize("n_masks", [8, 16])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_override(config: LaunchConfig, n_masks: int) -> None:
    if isinstance(config, DecodeMma) and config.cluster > 1 and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters of blocks need compute capability 9.0")
    for d, h in ((100, 1032), (16, 64), (2051, 520)):  # with the last two, a cluster has a block without rows
        for tokens in (1, 6):
            Problem(tokens, d, h, n_masks).check(config)


def test_unsupported() -> None:
    p = Problem(1, 32, 64, 2)
    assert unsupported("cuda", p.x.cpu(), p.weight, p.packed_masks, "silu", None)
    assert unsupported("cuda", p.x.double(), p.weight.double(), p.packed_masks, "silu", None)


def test_many_tokens_run_on_the_backend_if_it_is_named() -> None:
    """With 32 rows of W, only kernels for few tokens take the call, so `composite` would be faster."""
    Problem(1000, 32, 64, 2).check()


STORED = [name for name, one in FORMATS.items() if not one.is_dense]


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "d", "h", "n_masks"),
    [
        (1, 67, 46, 3),
        (5, 130, 64, 16),
        (1, 2048, 4096, 4),
        (16, 1030, 2064, 16),
        (9, 1030, 2064, 7),
        (40, 1030, 2064, 1),
        (24, 1030, 2080, 4),
        (300, 1030, 2080, 2),
        (130, 1030, 2080, 9),
        (64, 200, 4096, 16),
    ],
)
def test_a_weight_in_fewer_bits(name: str, dtype: torch.dtype, tokens: int, d: int, h: int, n_masks: int) -> None:
    given, expected = stored_layer(name, dtype, tokens, d, h, n_masks, "cuda")
    found = dispatch.forward(given, backend="cuda")
    assert relative_error(found.cpu(), expected) < BUDGET[dtype]
    by_composite = dispatch.forward(given, backend="composite")  # rounds the decoded weight to x's dtype
    assert relative_error(by_composite.cpu(), expected) < 2 * BUDGET[dtype]
    padded = torch.zeros(d, given.weight.shape[1] + 16, dtype=torch.uint8, device="cuda").view(given.weight.dtype)
    padded[:, 16:].copy_(given.weight)
    for weight in (given.weight.t().contiguous().t(), padded[:, 16:]):
        found = dispatch.forward(given._replace(weight=weight), backend="cuda")
        assert relative_error(found.cpu(), expected) < BUDGET[dtype]
    shifted = torch.empty(tokens, h + 1, dtype=dtype, device="cuda")[:, 1:].copy_(given.x)  # TMA cannot load it
    assert relative_error(dispatch.forward(given._replace(x=shifted), backend="cuda").cpu(), expected) < BUDGET[dtype]


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "launch",
    [
        TileWgmma(block_tokens=32, stages=4, decoded=True),
        TileWgmma(block_tokens=32, stages=4, decoded=True, permuted=True),
        # With one chunk per stage, the kernel writes a stage's fragments while products of the previous stage may run.
        TileWgmma(block_tokens=16, stages=4, sparse=True),
        TileWgmma(rows=128, block_tokens=24, stages=3, sparse=True),
        TileWgmma(block_tokens=32, stages=3, mask_groups=2, sparse=True),
        TileWgmma(rows=80, block_tokens=32, stages=3),
        TileWgmma(block_tokens=32, stages=3, steps=2, permuted=True),
        TileWgmma(block_tokens=32, stages=3, permuted=True, cluster=2),
    ],
    ids=str,
)
def test_tiles_of_weights_in_fewer_bits(name: str, dtype: torch.dtype, launch: TileWgmma) -> None:
    given, expected = stored_layer(name, dtype, 70, 330, 2080, 4, "cuda")
    padded = torch.zeros(330, given.weight.shape[1] + 16, dtype=torch.uint8, device="cuda").view(given.weight.dtype)
    padded[:, 16:].copy_(given.weight)
    for weight in (given.weight, padded[:, 16:]):
        found = dispatch.forward(given._replace(weight=weight), backend="cuda", launch=launch)
        assert relative_error(found.cpu(), expected) < BUDGET[dtype]


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 20])
def test_every_stored_value_is_decoded(name: str, dtype: torch.dtype, tokens: int) -> None:
    for column in range(31):
        given, expected = every_stored_value(name, column, dtype, "cuda")
        found = dispatch.forward(given._replace(x=given.x.repeat(tokens, 1)), backend="cuda")
        torch.testing.assert_close(found[-1], expected, equal_nan=True, rtol=0, atol=0)
