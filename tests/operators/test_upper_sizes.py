"""The largest sizes that checks and backends accept, and the next larger sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mglu_ops import dispatch
from mglu_ops.backends import BACKENDS, cuda
from mglu_ops.backends.cuda.device import KNOWN_GPUS
from mglu_ops.call import Call
from tests.support.layers import make_layer

GPU = torch.device("cuda", 0)


@pytest.fixture
def _h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "gpu_of", lambda _: KNOWN_GPUS[9, 0])
    monkeypatch.setattr(cuda, "has_cuda_core", lambda: True)


def on_gpu(tokens: int, out_features: int, in_features: int, dtype: torch.dtype = torch.bfloat16) -> Call:
    return Call.contiguous(GPU, dtype, 1, tokens, out_features, in_features)


@pytest.mark.usefixtures("_h100")
@pytest.mark.parametrize(("rows", "columns", "fits"), [
    (2**31 - 1, 8, True), (2**31, 8, False), (8, 2**28 - 1, True), (8, 2**28, False),
])  # fmt: skip
def test_the_cuda_kernels_index_a_weight_with_32_bits(rows: int, columns: int, fits: bool) -> None:
    problem = BACKENDS["cuda"].reason("forward", on_gpu(1, rows, columns))
    assert problem is None if fits else "has a dimension beyond the kernels' 32-bit indices" in str(problem)


@pytest.mark.usefixtures("_h100")
@pytest.mark.parametrize("which", range(3))
def test_the_cuda_kernels_for_training_take_sizes_below_2_to_the_30(which: int) -> None:
    for size, fits in ((2**30 - 1, True), (2**30, False)):
        sizes = [8, 8, 8]
        sizes[which] = size
        for task in ("train", "backward"):
            assert (BACKENDS["cuda"].reason(task, on_gpu(*sizes)) is None) == fits


@pytest.mark.usefixtures("_h100")
@pytest.mark.parametrize("dim", [1, 2])
def test_the_cuda_kernels_pack_fewer_than_2_to_the_31_rows_and_columns(dim: int) -> None:
    for size, fits in ((2**31 - 1, True), (2**31, False)):
        shape = [16, 8, 8]
        shape[dim] = size
        masks: Any = SimpleNamespace(device=GPU, dtype=torch.bool, shape=torch.Size(shape), dim=lambda: 3)
        assert BACKENDS["cuda"].can_pack(masks) == fits


@pytest.mark.usefixtures("_h100")
@pytest.mark.parametrize(("dtype", "n_masks", "limit"), [
    (torch.bfloat16, 1, 256), (torch.float16, 2, 512), (torch.float32, 1, 64), (torch.float32, 4, 64),
])  # fmt: skip
def test_masks_are_applied_on_chip_up_to_a_number_of_tokens(dtype: torch.dtype, n_masks: int, limit: int) -> None:
    """The 33 columns exclude `tile_wgmma`, which has no limit of tokens."""
    for tokens, backend in ((limit, "cuda"), (limit + 1, "composite")):
        call = Call.contiguous(GPU, dtype, n_masks, tokens, 64, 33)
        assert dispatch.choose("forward", call).backend == backend


@pytest.mark.usefixtures("_h100")
def test_more_tokens_run_on_cuda_only_if_it_is_named() -> None:
    """The 33 columns exclude `tile_wgmma`, and the other kernels read the weight again for every few tokens."""
    few, more = (Call.contiguous(GPU, torch.float16, 2, tokens, 64, 33) for tokens in (512, 513))
    assert BACKENDS["cuda"].reason("forward", few) is None
    reason = BACKENDS["cuda"].reason("forward", more)
    assert reason is not None
    assert str(reason) == "for 513 tokens (more than 512)"
    assert reason.is_preference
    assert dispatch._asked_for("cuda", "forward", more) is BACKENDS["cuda"]


def test_all_kept_calls_are_dropped_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "CALLS_KEPT", 3)
    monkeypatch.setattr(dispatch, "_prepared", {})
    calls = (("forward", 1), ("forward_train", 1), ("forward", 2), ("forward_train", 1), ("forward_train", 2))
    for (op, tokens), kept in zip(calls, (1, 2, 3, 3, 1), strict=True):
        layer = make_layer((tokens,))
        getattr(torch.ops.mglu, op)(layer.x, layer.weight, layer.packed_masks)
        assert len(dispatch._prepared) == kept
