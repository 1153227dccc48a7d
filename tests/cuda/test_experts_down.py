"""Launches of `experts_down` compile without spills for every architecture, and fit into every GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from test_cuda_compile import REGISTERS_PER_SM, compiled

from mglu_ops.backends.cuda.device import KNOWN_GPUS
from mglu_ops.backends.cuda.kernels import experts_down
from mglu_ops.call import Call
from mglu_ops.formats import FORMATS
from tests.support.families import quick_cases

MODELS = {"Qwen3-30B-A3B": (128, 2048, 768, 8), "Mixtral": (8, 4096, 14336, 2), "gpt-oss": (32, 2880, 2880, 4)}
"""Experts, out_features, in_features and experts per token."""


def down_call(
    tokens: int,
    model: tuple[int, int, int, int] = MODELS["Qwen3-30B-A3B"],
    dtype: torch.dtype = torch.bfloat16,
    weight_format: str = "dense",
) -> Call:
    experts, out_features, in_features, top_k = model
    layer = Call.contiguous(
        torch.device("cuda"), dtype, 0, 1, out_features, in_features, "identity", weight_format=weight_format
    )
    return layer.over_experts(experts, tokens, top_k, torch.float32)


@pytest.mark.parametrize(
    ("name", "arch", "tokens"),
    quick_cases(
        [("dense", (9, 0), 8), ("fp8_block", (9, 0), 1)],
        itertools.product(FORMATS, [(8, 0), (9, 0)], (1, 8, 256, 700)),
    ),
)
def test_compiles_without_spills(name: str, arch: tuple[int, int], tokens: int) -> None:
    gpu = KNOWN_GPUS[arch]
    for dtype, model in ((torch.float16, "Qwen3-30B-A3B"), (torch.bfloat16, "Mixtral")):  # without and with split-K
        call = down_call(tokens, MODELS[model], dtype, name)
        config = experts_down.choose(call, gpu)
        assert config is not None
        (products, *combine) = experts_down.sources(config, call, gpu)
        registers, spills, log = compiled(*products)
        assert spills == 0, log
        assert registers * config.threads * config.blocks_per_sm <= REGISTERS_PER_SM, log
        for source in (*combine, *experts_down.sources(None, call, gpu)):
            assert compiled(*source)[1] == 0


@pytest.mark.parametrize("name", FORMATS)
def test_every_launch_fits(name: str) -> None:
    """For calls of all sizes, an SM holds as many blocks at once as the grid assumes."""
    shapes = (*MODELS.values(), (512, 2048, 512, 10), (4, 16, 64, 1), (3, 40, 32, 2), (256, 7168, 2048, 8))
    for gpu, shape, tokens in itertools.product(KNOWN_GPUS.values(), shapes, (1, 2, 16, 100, 900)):
        for invariant in (False, True):
            call = down_call(tokens, shape, weight_format=name)
            call = replace(call, batch_invariant=invariant)
            config = experts_down.choose(call, gpu)
            assert config is not None, (gpu, shape, tokens)
            assert config.violation(call, gpu) is None
            assert config.stages >= 2
            used = config.blocks_per_sm * (config.shared_bytes(call) + 1024)
            assert used <= gpu.shared_bytes_per_sm
            assert (config.block_tokens == 1) == (tokens == 1 and not invariant)


def test_library_products_take_many_rows_of_an_expert() -> None:
    hopper = KNOWN_GPUS[9, 0]
    few, many = down_call(256, MODELS["Mixtral"]), down_call(512, MODELS["Mixtral"])
    assert [experts_down.uses_library(call, hopper) for call in (few, many)] == [False, True]
    for name, arch in (("fp8_row", (9, 0)), ("dense", (8, 0))):
        other = down_call(512, MODELS["Mixtral"], weight_format=name)
        assert not experts_down.uses_library(other, KNOWN_GPUS[arch])
        assert experts_down.unsupported_reason(other, KNOWN_GPUS[arch]) is None
