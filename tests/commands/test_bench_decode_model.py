"""The model of the decoding benchmark: its logits, its steps and the bytes of its weights."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from benchmarks import decode_model
from benchmarks.decoder import Decoder, Sizes
from benchmarks.records import Row, measure, read
from benchmarks.timing import relative_error

SIZES = Sizes(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, vocabulary=50, context=16)


def rope(heads: Tensor, base: float) -> Tensor:
    """Rotate `[tokens, heads, width]` by position. Features j and j + width / 2 make one complex number."""
    count, _, width = heads.shape
    angles = torch.arange(count)[:, None] * base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    pairs = torch.complex(*heads.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def reference_logits(model: Decoder, sizes: Sizes, tokens: Tensor) -> Tensor:
    """The logits of the whole sequence at once, without a cache, in float64."""
    x = model.start.embedding(tokens).double()
    block: Any
    for block in model.blocks:
        attention = block.attention
        heads = attention.inputs.double()(block.attention_norm.double()(x)).view(len(tokens), -1, sizes.head_width)
        query, key, value = heads.split([sizes.heads, sizes.kv_heads, sizes.kv_heads], dim=1)
        group = sizes.heads // sizes.kv_heads
        query, key = rope(query, sizes.rope_base), rope(key, sizes.rope_base).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhw,khw->hqk", query, key) / sizes.head_width**0.5
        causal = torch.ones(len(tokens), len(tokens)).tril().bool()
        weights = scores.masked_fill(~causal, -math.inf).softmax(-1)
        mixed = torch.einsum("hqk,khw->qhw", weights, value.repeat_interleave(group, dim=1))
        x = x + attention.output.double()(mixed.flatten(1))
        x = x + block.down.double()(block.projection.double()(block.projection_norm.double()(x)))
    return model.head.norm.double()(x) @ model.head.weight.double().T


@pytest.mark.long
@pytest.mark.parametrize("n_masks", [0, 2])
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_decoding_is_attention_over_the_whole_sequence(n_masks: int, batch: int) -> None:
    torch.manual_seed(0)
    model = decode_model.build(SIZES, n_masks, "cpu", torch.float32, batch)
    decoding = decode_model.Decoding.start(model)
    tokens, logits = [], []
    for _ in range(6):
        tokens.append(decoding.token.clone())
        logits.append(decoding.step())
        assert torch.equal(decoding.token, logits[-1].argmax(dim=-1))
    assert int(decoding.position) == 6
    assert torch.equal(decode_model.logits_of(model, tokens), torch.cat(logits))
    assert len({int(token) for token in tokens[0]}) == batch
    for sequence in range(batch):
        expected = reference_logits(model, SIZES, torch.stack([token[sequence] for token in tokens]))
        assert relative_error(torch.stack([one[sequence] for one in logits]), expected) < 1e-5


@pytest.mark.parametrize("n_masks", [0, 2])
@torch.no_grad()
def test_float64_block_by_block_is_float64(n_masks: int) -> None:
    torch.manual_seed(0)
    model = decode_model.build(SIZES, n_masks, "cpu", torch.bfloat16, 3)
    before = [parameter.clone() for parameter in model.blocks.parameters()]
    tokens = [torch.tensor([i, i + 1, i + 2]) for i in range(4)]
    expected = decode_model.logits_of(copy.deepcopy(model).double(), tokens)
    assert torch.equal(decode_model.logits_of(decode_model.in_float64(model), tokens), expected)
    torch.testing.assert_close(list(model.blocks.parameters()), before, rtol=0, atol=0)


@pytest.mark.parametrize("n_masks", [0, 2])
@torch.no_grad()
def test_a_model_in_fp8_is_compared_with_its_decoded_weights(n_masks: int) -> None:
    torch.manual_seed(0)
    model = decode_model.build(SIZES, n_masks, "cpu", torch.bfloat16, fp8=True)
    stored = [one for one in model.blocks.parameters() if one.dtype is torch.float8_e4m3fn]
    assert len(stored) == 4 * SIZES.layers
    assert not any(isinstance(one, torch.nn.Linear) for one in model.blocks.modules())
    before = [parameter.clone() for parameter in model.blocks.parameters()]
    decoding = decode_model.Decoding.start(model)
    error, eager = decoding.errors(decoding.step)
    assert error == eager
    assert 1e-4 < error < 3e-2
    torch.testing.assert_close(list(model.blocks.parameters()), before, rtol=0, atol=0)


def test_a_copy_shares_all_tensors() -> None:
    model = decode_model.build(SIZES, 2, "cpu", torch.bfloat16)
    copied = decode_model.sharing(model)
    assert copied is not model
    pairs = zip([*model.parameters(), *model.buffers()], [*copied.parameters(), *copied.buffers()], strict=True)
    assert all(ours is theirs for ours, theirs in pairs)


@torch.no_grad()
def test_errors_of_a_step_are_against_float64() -> None:
    torch.manual_seed(0)
    decoding = decode_model.Decoding.start(decode_model.build(SIZES, 1, "cpu", torch.bfloat16))
    error, eager = decoding.errors(decoding.step)
    assert error == eager  # `step` is the eager model here
    assert 1e-4 < error < 3e-2
    assert int(decoding.position) == int(decoding.token) == 0
    assert decoding.errors(lambda: decoding.step() * 1.5)[0] == pytest.approx(0.5, abs=0.05)


@pytest.mark.long
@torch.no_grad()
def test_the_blocks_compile_once() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    decoding = decode_model.Decoding.start(decode_model.build(replace(SIZES, layers=3), 2, "cpu", torch.float32))
    counter = torch._dynamo.testing.CompileCounter()
    decoding.model.compile_parts(lambda part: part.compile(backend=counter, fullgraph=True, dynamic=False))
    error, eager = decoding.errors(decoding.step)
    assert counter.frame_count == 3  # the start, one block and the head
    assert error == eager < 1e-5


def test_bytes_of_weights_count_each_matrix_once() -> None:
    for n_masks in (0, 1, 4):
        model = decode_model.build(SIZES, n_masks, "cpu", torch.bfloat16)
        h, d = SIZES.hidden, SIZES.intermediate
        attention = h * (SIZES.heads + 2 * SIZES.kv_heads) * SIZES.head_width + h * h
        projections = 2 * d * h if n_masks else 3 * d * h
        numbers = SIZES.layers * (attention + projections + 2 * h) + h + SIZES.vocabulary * h
        assert model.weight_bytes() == 2 * numbers + SIZES.layers * n_masks * d * h // 8


def test_problems_that_were_measured_are_left_out(tmp_path: Path) -> None:
    measured: list[tuple[int, int]] = []

    def bench(problem: decode_model.Problem) -> list[Row]:
        assert not problem.fp8
        measured.append((problem.sizes.layers, problem.batch))
        size = problem.batch, problem.sizes.intermediate, problem.sizes.hidden, 0
        return [
            Row("decode model", "SwiGLU", *size, "bfloat16", 1.0, 0.0, 1.0, 0.0, {"compilation": i})
            for i in range(problem.compilations)
        ]

    problems = decode_model.PROBLEMS
    measure(problems[:2], bench, tmp_path, "decode_model", decode_model.PROTOCOL)
    measure(problems, bench, tmp_path, "decode_model", decode_model.PROTOCOL, resume=True)
    assert measured == [(16, 1), (16, 8), (16, 32), (32, 1), (32, 8), (32, 32)]
    assert len(read(tmp_path, "decode_model")) == 3 + 5  # a row for each compilation of each problem
