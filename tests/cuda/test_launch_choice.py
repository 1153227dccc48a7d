"""Launches of the CUDA backend: every call has one, and settings that cannot run are refused with a reason."""

from __future__ import annotations

import ctypes
import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from mglu_ops.backends.cuda import DecodeMma, TileWgmma, driver
from mglu_ops.backends.cuda.choice import without_tables
from mglu_ops.backends.cuda.device import KNOWN_GPUS, RESERVED_SHARED_BYTES_PER_BLOCK
from mglu_ops.backends.cuda.kernels import permute_x
from mglu_ops.backends.cuda.kernels.tile_wgmma_training import TrainingTile, training_choice
from mglu_ops.backends.cuda.launch import parameters
from mglu_ops.backends.parameters import MAP_BYTES
from mglu_ops.call import Call
from mglu_ops.formats import FORMATS

ARCHITECTURES = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
HOPPER = KNOWN_GPUS[9, 0]


def contiguous(n_masks: int, tokens: int, d: int, h: int, dtype: torch.dtype = torch.float16, **options: Any) -> Call:
    return Call.contiguous(torch.device("cuda"), dtype, n_masks, tokens, d, h, **options)


def unaligned(call: Call) -> Call:
    """The call with an x that TMA cannot load."""
    return replace(call, x=replace(call.x, alignment=8))


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=str)
def test_choices_keep_to_the_limits_and_cover_the_result(arch: tuple[int, int]) -> None:
    gpu = KNOWN_GPUS[arch]
    shapes = ((16, 8), (100, 4096), (14336, 4096), (8192, 2048), (4096, 14336), (8192, 65536))
    for dtype, n_masks, tokens, shape in itertools.product(
        (torch.float16, torch.float32), range(1, 17), (1, 2, 8, 9, 17, 64, 300, 8192), shapes
    ):
        call = contiguous(n_masks, tokens, *shape, dtype)
        for other in (call, replace(call, batch_invariant=True), unaligned(call)):
            config = without_tables(other, gpu)
            assert config.violation(other, gpu) is None, (other, config)
            if isinstance(config, DecodeMma):  # exactly the intended number of blocks fits on an SM
                requested = config.requested_shared_bytes(other, gpu)
                assert requested >= config.shared_bytes(other)
                blocks = gpu.shared_bytes_per_sm // (requested + RESERVED_SHARED_BYTES_PER_BLOCK)
                assert blocks == config.blocks_per_sm
            if isinstance(config, TileWgmma):
                assert config.rows <= other.out_features
                assert config.stages >= 3
                assert config.threads <= 384
                assert not (config.permuted and config.sparse)
                copy = permute_x.step(other, gpu, "sm_90a", config.block_tokens, config.sub).nbytes
                assert copy >= tokens * other.in_features * 2
                assert copy % (8 * 128) == 0  # whole warps of permute_x
            elif arch == (9, 0) and dtype is torch.float16 and shape[1] >= 2048:
                assert tokens <= 16


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=str)
@pytest.mark.parametrize("out_features", [16, 2048, 8192, 9728, 14336, 28672])
def test_warps_of_few_tokens_fill_the_schedulers(out_features: int, arch: tuple[int, int]) -> None:
    gpu = replace(KNOWN_GPUS[arch], multiprocessors=132)
    for n_masks in (5, 8, 12, 16):
        config = without_tables(contiguous(n_masks, 8, out_features, 2048, torch.bfloat16), gpu)
        assert isinstance(config, DecodeMma)
        warps = config.tiles * config.split_k
        assert 7 <= warps <= 12
        assert warps / (4 * -(-warps // 4)) > 0.8


@pytest.mark.parametrize("name", FORMATS)
def test_one_and_two_masks_in_8_bits_stay_in_decode_mma(name: str) -> None:
    def chosen(n_masks: int, tokens: int, shape: tuple[int, int]) -> Any:
        call = contiguous(n_masks, tokens, *shape, torch.bfloat16, weight_format=name)
        return without_tables(call, HOPPER)

    wide, rows, in_8_bits = (14336, 4096), name in ("fp8_row", "int8_row"), name in ("fp8_row", "int8_row", "fp8_block")
    assert [isinstance(chosen(n, 16, wide), DecodeMma) for n in (1, 2, 4, 8)] == [in_8_bits, in_8_bits, False, False]
    for shape, parts in ((wide, 2), ((8192, 2048), 4)):
        one, two = chosen(1, 9, shape), chosen(2, 9, shape)
        if rows:
            assert (one.split_k, one.sub) == (parts, 1)
            assert two.tiles * two.split_k < one.tiles * one.split_k
        if name == "fp8_block":
            assert [(chosen(n, 1, shape).split_k, chosen(n, 1, shape).sub) for n in (1, 2)] == [(parts, 2)] * 2
        assert chosen(1, 8, shape).sub > 1


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n_masks", range(1, 17))
def test_training_has_a_launch_for_every_aligned_call(n_masks: int, weighted: bool) -> None:
    for tokens, shape in ((1, (64, 64)), (33, (72, 320)), (8192, (1000, 4096)), (32768, (28672, 8192))):
        call = contiguous(n_masks, tokens, *shape, mask_weights_dtype=torch.float32 if weighted else None)
        config = training_choice(call, HOPPER)
        assert isinstance(config, TrainingTile)
        assert config.violation(call, HOPPER) is None
        assert config.stages >= 3
        assert not config.sparse
        result, partials = config.results(call).values()
        assert (result.width, partials.width) == (shape[0], (n_masks * (1 + weighted) + 1) * shape[0])
        assert partials.width == call.n_partials * shape[0]
        assert result.height == partials.height == tokens
        permuted = training_choice(unaligned(call), HOPPER)
        assert permuted is not None
        assert permuted.permuted


def test_tile_wgmma_declines_results_that_tma_cannot_store() -> None:
    call = contiguous(4, 1024, 8192, 2048)
    assert training_choice(call, HOPPER) is not None
    for refused in (
        replace(call, out_features=8196),
        replace(call, dtype=torch.float32),
        replace(call, leading=(0,)),
        replace(call, weight=replace(call.weight, layout=replace(call.weight.layout, alignment=8))),
    ):
        assert training_choice(refused, HOPPER) is None
    assert training_choice(call, KNOWN_GPUS[10, 0]) is None


DECODE = DecodeMma(block_tokens=16)
TILE = TileWgmma(rows=64, block_tokens=24, stages=4)
TRAINING = training_choice(contiguous(4, 1024, 8192, 2048), HOPPER)


@pytest.mark.parametrize(
    ("config", "n_masks", "settings", "reason"),
    [
        (DECODE, 16, {"sub": 3, "mask_group": 8}, "sub: got 3, must be 1, 2 or 4"),
        (DECODE, 12, {"sub": 4, "mask_group": 12}, "mask_group: got 12, must divide n_masks 12 into whole words"),
        (DECODE, 16, {"sub": 4, "mask_group": 4, "split_k": 8}, r"\d+ bytes of shared memory a block, more than"),
        (DECODE, 8, {"mask_group": 8, "cluster": 4}, "cluster: got 4, must be 1, or 2 on compute capability 9.0"),
        (
            DECODE,
            8,
            {"mask_group": 8, "cluster": 2, "block_tokens": 4},
            "cluster: got 2, must be 1, or 2 .* has all tokens",
        ),
        (TILE, 8, {"sparse": True}, None),
        (TILE, 8, {"sparse": True, "permuted": True}, "permuted: not with sparse products"),
        (TILE, 8, {"cluster": 2}, None),
        (TILE, 8, {"cluster": 4}, "cluster: got 4, must be 1 or 2$"),
        # In the next two cases, a stage is more than one group of wgmmas, as it must be. In the third, it is one group.
        (TILE, 2, {"block_tokens": 64, "mask_groups": 2, "steps": 2}, None),
        (TILE, 2, {"block_tokens": 64, "mask_groups": 2, "sub": 2, "steps": 4}, None),
        (TILE, 2, {"block_tokens": 64, "mask_groups": 2, "steps": 4}, "steps: got 4, must be less"),
        (TRAINING, 4, {"sparse": True, "permuted": False}, "sparse: not in training"),
        (TRAINING, 4, {"weighted": True}, "weighted: got True, for mask weights None"),
        (TRAINING, 4, {"box_tokens": 12}, "box_tokens: got 12, must be a multiple of 8 that divides 64"),
        (TRAINING, 4, {"box_tokens": 64}, r"\d+ bytes of shared memory a block, more than"),
    ],
)
def test_settings_that_a_launch_can_and_cannot_have(config, n_masks, settings, reason):
    call = contiguous(n_masks, 1024, 8192, 2048) if config is TRAINING else contiguous(n_masks, 6, 128, 64)
    found = replace(config, **settings).violation(call, HOPPER)
    assert found is None if reason is None else re.match(reason, found or "")


def test_clusters_of_tiles_are_pairs() -> None:
    tile = replace(TILE, cluster=2)
    # There are two tiles of rows, and five tiles of tokens, which clusters of two round up to six: 2 * 6 blocks.
    assert tile.grid(contiguous(8, 100, 128, 64), HOPPER) == (12, 1)
    assert tile.grid(contiguous(8, 10_000, 128, 64), replace(HOPPER, multiprocessors=11)) == (10, 1)


class Driver:
    """A fake driver that loads any kernel, and keeps the bytes of the parameter struct of each launch."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.structs: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, extra: None) -> int:  # noqa: N802
        self.structs.append(ctypes.string_at(arguments[0], self.size))
        return 0


def test_pointers_and_maps_are_at_the_offsets_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = parameters("params.cuh", "TileParams")
    recorder = Driver(fields.size)
    monkeypatch.setattr(driver, "_library", lambda: recorder)
    integers = {name: 1000 + i for i, name in enumerate(fields.longs + fields.ints)}
    kernel = driver.Kernel(b"", "mglu_tile_wgmma", 0)
    launch = driver.Launch(kernel, (1, 1), 128, 0, overlap=True, parameters=fields, integers=integers)
    addresses = {name: 1 + i for i, name in enumerate(reversed(fields.pointers))}
    two_maps = bytes([2]) * MAP_BYTES + bytes([3]) * MAP_BYTES
    launch(0, addresses)
    launch(0, addresses, two_maps)
    launch(0, addresses, bytes([1]) * MAP_BYTES + two_maps)
    for found, maps in zip(recorder.structs, (b"", two_maps, bytes([1]) * MAP_BYTES + two_maps), strict=True):
        head = bytearray(fields.with_integers(integers))
        fields.pointer_struct.pack_into(head, 0, *(addresses[name] for name in fields.pointers))
        assert found == bytes(head[: fields.size - len(maps)]) + maps
    with pytest.raises(KeyError, match="out"):
        launch(0, {name: 0 for name in fields.pointers if name != "out"})
