"""The launches of `tile_wgmma` in training: every aligned call has one, and refused launches come with a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mglu_ops.backends.cuda.device import KNOWN_GPUS
from mglu_ops.backends.cuda.kernels.tile_wgmma_training import TrainingTile, partials_of, training_choice
from mglu_ops.layer_call import LayerCall

HOPPER = KNOWN_GPUS[9, 0]


def training_call(n_masks: int, tokens: int, shape: tuple[int, int], weighted: bool = False) -> LayerCall:
    mask_weight = torch.float32 if weighted else None
    return LayerCall.contiguous(
        torch.device("cuda"), torch.bfloat16, n_masks, tokens, *shape, mask_weights_dtype=mask_weight
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n_masks", range(1, 17))
def test_training_has_a_launch_for_every_aligned_call(n_masks: int, weighted: bool) -> None:
    for tokens, shape in ((1, (64, 64)), (33, (72, 320)), (8192, (1000, 4096)), (32768, (28672, 8192))):
        call = training_call(n_masks, tokens, shape, weighted)
        config = training_choice(call, HOPPER)
        assert isinstance(config, TrainingTile)
        assert config.violation(call, HOPPER) is None
        assert config.stages >= 3
        assert not config.sparse
        result, partials = config.results(call)
        assert (result.width, partials.width) == (shape[0], (n_masks * (1 + weighted) + 1) * shape[0])
        assert partials.width == partials_of(call) * shape[0]
        assert result.height == partials.height == tokens
        # Pretend that TMA cannot load x.
        unaligned = training_choice(replace(call, x=replace(call.x, alignment=8)), HOPPER)
        assert unaligned is not None
        assert unaligned.permuted


def test_tile_wgmma_declines_results_that_tma_cannot_store() -> None:
    call = training_call(4, 1024, (8192, 2048))
    assert training_choice(call, HOPPER) is not None
    for refused in (
        replace(call, out_features=8196),
        replace(call, dtype=torch.float32),
        replace(call, leading=(0,)),
        replace(call, weight=replace(call.weight, layout=replace(call.weight.layout, alignment=8))),
    ):
        assert training_choice(refused, HOPPER) is None
    assert training_choice(call, KNOWN_GPUS[10, 0]) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sparse": True, "permuted": False}, "sparse: not in training"),
        ({"weighted": True}, "weighted: got True, for mask weights None"),
        ({"box_tokens": 12}, "box_tokens: got 12, must be a multiple of 8 that divides 64"),
        ({"box_tokens": 24}, "box_tokens: got 24, must be a multiple of 8 that divides 64"),
        ({"box_tokens": 64}, "bytes of shared memory a block, more than"),
    ],
)
def test_a_launch_that_cannot_train_says_why(settings: dict[str, Any], words: str) -> None:
    call = training_call(4, 1024, (8192, 2048))
    config = training_choice(call, HOPPER)
    assert config is not None
    assert config.block_tokens == 64
    assert words in (replace(config, **settings).violation(call, HOPPER) or "")
