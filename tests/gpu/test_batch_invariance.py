"""In batch-invariant mode, the result of a row has the same bits in every batch, with every kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import mglu_ops
from mglu_ops import dispatch
from mglu_ops.backends.cuda.choice import without_tables
from mglu_ops.backends.cuda.device import KNOWN_GPUS
from mglu_ops.call import Call
from mglu_ops.formats import FORMATS
from tests.support.budgets import assert_matches
from tests.support.calls import Problem, run_on
from tests.support.layers import stored_layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:mglu..forward runs on the backend cuda"),  # warns of unaligned rows of masks
]

TOKENS = (1, 2, 7, 8, 9, 16, 17, 33, 64, 200)
HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def invariant() -> Iterator[None]:
    with torch.no_grad(), mglu_ops.set_batch_invariant_mode():
        yield


def assert_rows_agree(p: Problem, x: Tensor) -> None:
    """Compare the bits of a batch with smaller batches: its first rows, its last rows, and one row from the middle."""

    def run(rows: Tensor) -> Tensor:
        return torch.ops.mglu.forward(rows, p.weight, p.packed_masks, p.activation)

    everyone = run(x)
    p.x = x
    assert_matches(everyone, p.oracle(), x.dtype)
    for tokens in TOKENS:
        assert torch.equal(run(x[:tokens]), everyone[:tokens]), tokens
        assert torch.equal(run(x[-tokens:]), everyone[-tokens:]), tokens
    assert torch.equal(run(x[77]), everyone[77])
    assert torch.equal(run(x.view(10, 20, -1)), everyone.view(10, 20, -1))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("n_masks", [1, 4, 7, 8, 16])
@pytest.mark.parametrize("shape", [(512, 2048), (1001, 1032), (4096, 520)], ids=str)
def test_rows_of_any_batch(shape: tuple[int, int], n_masks: int, dtype: torch.dtype) -> None:
    p = Problem(200, *shape, n_masks, dtype)
    fast = "tile_wgmma" if torch.cuda.get_device_capability() == (9, 0) else "decode_mma"
    aligned = shape[1] // 8 * n_masks % 4 == 0
    assert mglu_ops.explain_dispatch(p.x, p.weight, p.packed_masks).kernel == (fast if aligned else "plain")
    assert_rows_agree(p, p.x)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "dense"])
def test_rows_of_weights_in_fewer_bits(name: str) -> None:
    given, _ = stored_layer(name, torch.bfloat16, 200, 512, 2048, 4, "cuda")
    everyone = dispatch.forward(given, backend="cuda")
    for tokens in TOKENS:
        weights = given._replace(x=given.x[:tokens], mask_weights=given.mask_weights[:tokens])  # type: ignore[index]
        assert torch.equal(dispatch.forward(weights, backend="cuda"), everyone[:tokens]), tokens


@pytest.mark.parametrize("n_masks", [3, 16])
@pytest.mark.parametrize(
    ("dtype", "shape", "kernel"),
    [
        (torch.float16, (40, 1024), "decode_mma"),
        (torch.bfloat16, (100, 1001), "plain"),
        (torch.float32, (100, 1024), "plain"),
    ],
)
def test_rows_of_small_and_odd_layers(dtype: torch.dtype, shape: tuple[int, int], kernel: str, n_masks: int) -> None:
    p = Problem(200, *shape, n_masks, dtype)
    assert mglu_ops.explain_dispatch(p.x, p.weight, p.packed_masks).kernel == kernel
    assert_rows_agree(p, p.x)


@pytest.mark.parametrize("n_masks", [1, 4, 10, 16])
def test_rows_on_other_gpus(n_masks: int) -> None:
    """Runs, on this GPU, the launches that are chosen for other GPUs."""
    p = Problem(200, 528, 2048, n_masks, torch.bfloat16)
    for arch in ((8, 0), (8, 9), (12, 0)):
        everyone = None
        for tokens in reversed(TOKENS):
            call = Call.contiguous(p.x.device, torch.bfloat16, n_masks, tokens, 528, 2048)
            config = without_tables(replace(call, batch_invariant=True), KNOWN_GPUS[arch])
            assert config.kernel == "decode_mma"
            result = run_on("cuda", p.x[:tokens], p.weight, p.packed_masks, "silu", None, launch=config)
            everyone = result if everyone is None else everyone
            assert torch.equal(result, everyone[:tokens]), (arch, tokens)


def test_the_mode_changes_repeated_calls() -> None:
    p = Problem(1, 8192, 4096, 16, torch.float16)
    in_mode = torch.ops.mglu.forward(p.x, p.weight, p.packed_masks)
    with mglu_ops.set_batch_invariant_mode(False):
        outside = torch.ops.mglu.forward(p.x, p.weight, p.packed_masks)
    assert not torch.equal(in_mode, outside)  # outside the mode, sums have another order
    assert torch.equal(torch.ops.mglu.forward(p.x, p.weight, p.packed_masks), in_mode)
    for result in (in_mode, outside):
        assert_matches(result, p.oracle(), torch.float16)
