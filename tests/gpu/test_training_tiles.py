"""`tile_wgmma` in training, compared with float64: the result and all partial derivatives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mglu_ops.activations import ACTIVATIONS
from mglu_ops.backends.cuda.device import gpu_of
from mglu_ops.backends.cuda.kernels.tile_wgmma_training import TrainingTile, training_choice
from mglu_ops.backends.cuda.launch import load
from tests.support.budgets import assert_matches
from tests.support.calls import Problem
from tests.support.layers import bands_of, between
from tests.support.training_steps import exact_partials, products_of

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0")]

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32)


def outputs(p: Problem) -> tuple[Tensor, Tensor]:
    """Allocate the result and the partial derivatives. Both tensors and the memory around them are filled with NaN."""
    y, partials = (len(p.x), len(p.weight)), (len(p.x), p.call.n_partials, len(p.weight))
    nan = float("nan")
    return between(p.x.new_full(y, nan), nan), between(p.x.new_full(partials, nan), nan)


def launch(p: Problem, y: Tensor, partials: Tensor, config: TrainingTile | None = None) -> None:
    """Launch `config`, or without it the launch that the backend chooses."""
    call, gpu = p.call, gpu_of(0)
    launched = config or training_choice(call, gpu)
    assert launched is not None
    assert launched.violation(call, gpu) is None
    sequence = load(launched.plan(call, gpu), 0)
    workspace = torch.empty(sequence.workspace_bytes, dtype=torch.uint8, device="cuda")
    p.launch(sequence, y, workspace, partials=partials.data_ptr())


def run(p: Problem, config: TrainingTile | None = None) -> tuple[Tensor, Tensor]:
    """Compute the result and the partial derivatives, and check that the memory around them does not change."""
    found = outputs(p)
    launch(p, *found, config)
    assert all(bands_of(tensor).isnan().all() for tensor in found)
    return found


def oracle(p: Problem) -> tuple[Tensor, Tensor]:
    """The float64 result and partial derivatives, for 128 tokens at a time to save memory."""
    products = products_of(p.x, p.weight, p.masks).split(128)
    mask_weights = [None] * len(products) if p.mask_weights is None else p.mask_weights.split(128)
    parts = [exact_partials(t_and_f, p.activation, r) for t_and_f, r in zip(products, mask_weights, strict=True)]
    y, partials = zip(*parts, strict=True)
    return torch.cat(y), torch.cat(partials)


def check(p: Problem, config: TrainingTile | None = None) -> None:
    y, partials = run(p, config)
    expected, expected_partials = oracle(p)
    assert_matches(y, expected, p.x.dtype)
    assert partials.shape == expected_partials.shape
    if p.activation == "relu":  # its derivative jumps at 0, and rounding may change the sign of a gate near 0
        t, f = products_of(p.x, p.weight, p.masks).split([1, len(p.masks)], 1)
        near = ((t - f).abs() < 2.0**-10).any(1, keepdim=True)
        assert near.double().mean() < 0.02
        partials = torch.where(near, expected_partials.to(partials.dtype), partials)
    for i in range(partials.shape[1]):
        assert_matches(partials[:, i], expected_partials[:, i], p.x.dtype, f"partial derivative {i}")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_every_activation_and_dtype(activation: str, dtype: torch.dtype) -> None:
    for tokens, n_masks, mask_weight in ((100, 4, None), (300, 1, torch.float32), (70, 16, None)):
        check(Problem(tokens, 200, 256, n_masks, dtype, activation, mask_weight))


@pytest.mark.parametrize("mask_weight", [None, torch.float32])
@pytest.mark.parametrize("n_masks", range(1, 17))
def test_every_mask_count(n_masks: int, mask_weight: torch.dtype | None) -> None:
    for tokens, d, h in ((20, 72, 64), (200, 264, 544), (1000, 1000, 288)):
        check(Problem(tokens, d, h, n_masks, torch.bfloat16, mask_weights_dtype=mask_weight))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 9, 16, 17, 63, 65, 129, 1000])
def test_ragged_tokens(tokens: int, dtype: torch.dtype) -> None:
    for n_masks in (1, 4, 8):
        check(Problem(tokens, 328, 544, n_masks, dtype))


@pytest.mark.parametrize("out_features", [64, 72, 80, 120, 128, 136, 184, 200, 1000, 1032])
def test_ragged_out_features(out_features: int) -> None:
    """The last tile of rows overlaps the tile before it, so some results are written twice."""
    for tokens, n_masks, mask_weight in ((40, 3, None), (260, 4, torch.bfloat16), (260, 8, None)):
        check(Problem(tokens, out_features, 352, n_masks, torch.float16, mask_weights_dtype=mask_weight))


@pytest.mark.parametrize("n_masks", [1, 2, 4, 5, 8, 12, 16])
@pytest.mark.parametrize("shape", [(8192, 2048), (14336, 4096)], ids=str)
def test_real_shapes(shape: tuple[int, int], n_masks: int) -> None:
    check(Problem(1030, *shape, n_masks, torch.bfloat16, mask_weights_dtype=torch.float32 if n_masks == 5 else None))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("mask_weight", DTYPES)
def test_mask_weights(mask_weight: torch.dtype, dtype: torch.dtype) -> None:
    for n_masks in (2, 6, 8):
        p = Problem(150, 136, 320, n_masks, dtype, mask_weights_dtype=mask_weight)
        check(p)
        p.mask_weights = torch.rand(n_masks, 300, device="cuda").to(mask_weight)[:, ::2].t()  # strided
        check(p)
        order = torch.rand(150, n_masks, device="cuda").argsort(-1)
        p.mask_weights = torch.where(order < 2, torch.rand(150, n_masks, device="cuda"), 0).to(mask_weight)  # top 2
        check(p)


TILES = (
    TrainingTile(rows=64, block_tokens=8, stages=3),
    TrainingTile(rows=64, block_tokens=32, stages=3, box_tokens=16),
    TrainingTile(rows=112, block_tokens=16, stages=3, sub=2),
    TrainingTile(rows=80, block_tokens=24, stages=3, steps=2),
    TrainingTile(rows=64, block_tokens=24, stages=3, steps=2, box_tokens=24),
    TrainingTile(rows=64, block_tokens=64, mask_groups=2, stages=4, steps=2, box_tokens=16),
    TrainingTile(rows=128, block_tokens=16, mask_groups=2, stages=4, steps=2),
    TrainingTile(rows=128, block_tokens=40, passes=2, stages=3, steps=2),
    TrainingTile(rows=64, block_tokens=32, mask_groups=2, passes=2, stages=3, steps=2),
    TrainingTile(rows=64, block_tokens=16, stages=4, cluster=2),
    TrainingTile(rows=112, block_tokens=24, stages=3, sub=2, cluster=2),
    TrainingTile(rows=128, block_tokens=16, mask_groups=2, stages=3, steps=2, cluster=2),
    TrainingTile(rows=128, block_tokens=40, passes=2, stages=3, steps=2, cluster=2),
)


@pytest.mark.parametrize("mask_weight", [None, torch.float16])
@pytest.mark.parametrize("config", [*TILES, *(replace(tile, permuted=True) for tile in TILES)], ids=str)
def test_every_kind_of_launch(config: TrainingTile, mask_weight: torch.dtype | None) -> None:
    # With the last shape, a block computes several tiles. All shapes have an odd number of tiles of tokens, so one
    # block of a cluster has no tile.
    config = replace(config, weighted=mask_weight is not None)
    for tokens, d, h in ((6, 128, 64), (70, 1000, 1040), (70, 1000, 1032), (33, 20000, 528)):
        check(Problem(tokens, d, h, 8, mask_weights_dtype=mask_weight), config)
    if config.passes == 2:
        check(Problem(70, 1000, 1040, 16, mask_weights_dtype=mask_weight), config)
    elif config.sub == 2:
        check(Problem(70, 1000, 1152, 3, mask_weights_dtype=mask_weight), config)


def test_layouts_of_x() -> None:
    p = Problem(100, 136, 256, 4)
    wide = torch.randn(100, 512, device="cuda", dtype=p.x.dtype)
    for p.x in (wide[:, 8:264], wide[:, 1:257], wide[:, ::2], wide[:1, :256].expand(100, 256)):
        check(p)


@pytest.mark.parametrize("n_masks", [1, 4, 7, 8])
def test_same_bits_every_time_and_the_result_of_inference(n_masks: int) -> None:
    p = Problem(300, 1000, 1024, n_masks, torch.bfloat16)
    y, partials = run(p)
    for _ in range(20):
        again, partials_again = run(p)
        assert torch.equal(again, y)
        assert torch.equal(partials_again, partials)
    assert_matches(y, p.run().double(), torch.bfloat16)


def test_a_nan_does_not_spread_to_other_tokens() -> None:
    p = Problem(70, 136, 256, 4, torch.bfloat16)
    y, partials = run(p)
    p.x[33, 7] = float("nan")
    spoiled, spoiled_partials = run(p)
    assert spoiled[33].isnan().all()
    assert spoiled_partials[33].isnan().all()
    others = torch.arange(70, device="cuda") != 33
    assert torch.equal(spoiled[others], y[others])
    assert torch.equal(spoiled_partials[others], partials[others])


@pytest.mark.parametrize("n_masks", [1, 4, 8])
def test_the_next_launch_sees_the_results(n_masks: int) -> None:
    """The next launch may start early, but must not read the result before it is written."""
    first = Problem(520, 1024, 512, n_masks, torch.bfloat16)
    second = Problem(520, 256, 1024, n_masks, torch.bfloat16)
    second.x, partials_of_first = outputs(first)
    y, partials = outputs(second)
    for _ in range(50):
        first.x.normal_()
        launch(first, second.x, partials_of_first)
        launch(second, y, partials)
        torch.cuda.synchronize()
        y_alone, partials_alone = run(second)
        assert torch.equal(y, y_alone)
        assert torch.equal(partials, partials_alone)
