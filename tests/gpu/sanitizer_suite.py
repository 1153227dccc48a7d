"""The program for compute-sanitizer: it runs every kernel once or twice on small, odd shapes.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python3 tests/gpu/sanitizer_suite.py

Without the caching allocator, every tensor is a separate allocation, so the sanitizer knows where it ends. All inputs
are copied from the host, so the sanitizer knows that they are initialized.

The sanitizer watches only our kernels. The oracle and the GEMMs that a training step leaves to torch run on the CPU: if
their kernels ran on the GPU, initcheck would take their results for uninitialized memory. Racecheck breaks kernels that
run in clusters, unless it watches them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from mglu_ops import dispatch
from mglu_ops.backends import BACKENDS
from mglu_ops.backends.cuda import DecodeMma, LaunchConfig
from mglu_ops.backends.cuda.device import gpu_of
from mglu_ops.backends.cuda.kernels import backward_gemm
from mglu_ops.backends.cuda.kernels.experts import choose as choose_experts
from mglu_ops.call import Call
from mglu_ops.formats import ACTIVATION_FORMATS, FORMATS
from mglu_ops.masks import pack
from tests.support import reference
from tests.support.budgets import assert_matches
from tests.support.calls import launch_of, run_on
from tests.support.layers import down_oracle, make_down, make_layer, stored_layer
from tests.support.training_steps import TrainingLayer, take_step

Shape = tuple[int, int, int, int]

CASES: list[tuple[LaunchConfig | None, torch.dtype, Shape]] = [
    # Shapes are (tokens, out_features, in_features, n_masks). With None, the backend chooses the launch. These shapes
    # reach all kernels and their variants for odd sizes.
    *((None, torch.bfloat16, (tokens, 200, 264, 4)) for tokens in (1, 3, 8, 16, 20, 70)),
    *((None, torch.float16, (tokens, 130, 1032, 16)) for tokens in (1, 5, 30, 33)),
    *((None, torch.float16, (tokens, 66, 136, 1)) for tokens in (1, 2, 17)),
    (None, torch.float16, (40, 130, 512, 2)),
    *((None, torch.float16, (tokens, 33, 41, 3)) for tokens in (1, 6)),
    *((None, torch.float32, (tokens, 33, 72, 5)) for tokens in (1, 6)),
    # Tile sizes and split-K that the backend does not choose for the shapes above.
    (DecodeMma(tiles=2, split_k=2, stages=3, mask_group=8), torch.float16, (1, 35, 1032, 8)),
    (DecodeMma(tiles=3, sub=2, mask_group=2), torch.float16, (1, 100, 1040, 2)),
    (DecodeMma(tiles=4, mask_group=8), torch.bfloat16, (1, 100, 264, 8)),
    (DecodeMma(tiles=1, split_k=4, sub=2, mask_group=4, block_tokens=16), torch.float16, (11, 50, 520, 8)),
    (DecodeMma(tiles=2, split_k=2, mask_group=8, block_tokens=2), torch.bfloat16, (5, 70, 520, 16)),
]


def run(
    config: LaunchConfig | None, dtype: torch.dtype, shape: Shape, has_mask_weights: bool, kernels: Sequence[str]
) -> bool:
    """Run a call, check its result and return True. If `kernels` has names, but not the call's kernel, return False."""
    tokens, d, h, n_masks = shape
    x = torch.randn(tokens, h).to(dtype)
    weight = (torch.randn(d, h) / h**0.5).to(dtype)
    masks = torch.rand(n_masks, d, h) < 0.5
    used = torch.rand(n_masks) < 0.4  # masks that are not used have weight 0 for all tokens
    mask_weights = torch.rand(tokens, n_masks) * used if has_mask_weights else None
    on_gpu = [None if t is None else t.cuda() for t in (x, weight, pack(masks), mask_weights)]
    operands = (*on_gpu[:3], "silu", on_gpu[3])
    launched = config or launch_of(*operands).config  # type: ignore[arg-type] # list items may be None
    if kernels and launched.kernel not in kernels:
        return False
    result = run_on("cuda", *operands, launch=config)  # type: ignore[arg-type]
    assert_matches(result.cpu(), reference.forward(x, weight, masks, "silu", mask_weights), dtype, f"{config} {shape}")
    return True


STORED_SHAPES = ((1, 130, 288, 4), (9, 130, 288, 16), (20, 130, 288, 4), (40, 130, 288, 1), (40, 67, 46, 3))


def run_stored(activation_format: str, weight_format: str, shape: Shape, kernels: Sequence[str]) -> bool:
    """Like `run`, for a quantized weight and x in `activation_format`."""
    given, expected = stored_layer(weight_format, torch.bfloat16, *shape, "cuda", activation_format)
    launch = launch_of(*given).config
    if kernels and launch.kernel not in kernels:
        return False
    assert_matches(dispatch.forward(given, backend="cuda").cpu(), expected, torch.bfloat16, f"{launch} {shape}")
    return True


EXPERTS: tuple[Shape, ...] = (
    # With few tokens, blocks find their items themselves. With many tokens, they read a table of items.
    *((tokens, 130, 264, 4) for tokens in (1, 5, 40)),
    *((tokens, 33, 41, 3) for tokens in (1, 5, 40)),
)


def run_experts(sizes: Shape, kernels: Sequence[str]) -> bool:
    """Like `run`, for three experts: one call with ids, and one with rows sorted by expert."""
    tokens, d, h, n_masks = sizes
    options = {"experts": 3, "loads": "some out of range", "dtype": torch.bfloat16}
    for routing in ("ids", "offs"):
        layer = make_layer((tokens,), h, d, n_masks, routing=routing, **options)
        given = layer.to("cuda").given
        launch = choose_experts(Call.of(given), gpu_of(0))
        if kernels and launch.config.kernel not in kernels:
            return False
        found = dispatch.forward(given, backend="cuda")
        assert_matches(found.cpu(), layer.oracle(), torch.bfloat16, f"{launch} {sizes}")
    return True


def run_down(weight_format: str, tokens: int, in_features: int = 288) -> None:
    """Run a call of `experts_down`, and check its result."""
    options = {"experts": 3, "loads": "some out of range", "dtype": torch.bfloat16}
    layer = make_layer((tokens,), 130, in_features, 1, routing="ids", **options)
    given = make_down(layer, weight_format)
    on_gpu = given._replace(**{name: tensor.cuda() for name, tensor in given.tensors().items()})
    found = dispatch.down(None, on_gpu, backend="cuda")
    assert_matches(found.cpu(), down_oracle(given), torch.bfloat16, f"{weight_format}, {tokens} tokens")


def run_packing() -> None:
    """Pack bool masks, and logits of each dtype, with aligned and unaligned rows."""
    for dtype in (torch.bool, torch.float16, torch.bfloat16, torch.float32):
        for shape in ((4, 33, 72), (3, 5, 37), (16, 3, 136)):
            masks = torch.rand(shape) < 0.5
            source = masks if dtype is torch.bool else (masks.float() - 0.5).to(dtype)
            assert torch.equal(BACKENDS["cuda"].pack(source.cuda()).cpu(), pack(masks)), (dtype, shape)


LIBRARY_STEPS = ((torch.bfloat16, (9, 40, 72, 4)), (torch.float16, (5, 33, 41, 3)))
TILED_STEPS = (
    (torch.bfloat16, (70, 136, 264, 4)),
    (torch.float16, (40, 72, 160, 1)),
    (torch.bfloat16, (33, 64, 80, 6)),
)


def on_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU with the same strides, without running a kernel."""
    storage = tensor.untyped_storage().cpu()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def mm_on_host(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """`torch.mm`, computed on the CPU in float32."""
    return (on_host(a).float() @ on_host(b).float()).to(out_dtype or a.dtype).cuda()


def addmm_on_host(total: Tensor, a: Tensor, b: Tensor, *, beta: int, out: Tensor) -> Tensor:
    """`torch.addmm`, computed on the CPU in float32. If `beta` is 0, `total` is not read."""
    product = on_host(a).float() @ on_host(b).float()
    return out.copy_((product + on_host(total) if beta else product).to(out.dtype))


def not_for_tiles(*arguments: Any, **keywords: Any) -> Tensor:
    raise AssertionError("a step that should take tile_wgmma and backward_gemm takes a GEMM of the library")


def run_training(cases: Sequence[tuple[torch.dtype, Shape]]) -> None:
    """Run training steps with all gradients, with and without mask weights.

    TILED_STEPS are forced to use `tile_wgmma` and `backward_gemm`. LIBRARY_STEPS are forced to use library GEMMs.
    """
    tiled = cases is TILED_STEPS
    mm, addmm = (not_for_tiles, not_for_tiles) if tiled else (mm_on_host, addmm_on_host)
    with (
        patch.object(backward_gemm, "is_faster", lambda *sizes: tiled),
        patch.object(torch, "mm", mm),
        patch.object(torch, "addmm", addmm),
    ):
        for dtype, shape in cases:
            for mask_weights_dtype in (None, torch.float32):
                run_step(dtype, shape, mask_weights_dtype)


def run_step(dtype: torch.dtype, shape: Shape, mask_weights_dtype: torch.dtype | None) -> None:
    """Run forward and backward of one layer, and check the result and all gradients."""
    tokens, *sizes = shape
    layer = TrainingLayer.random("cpu", dtype, (tokens,), *sizes, mask_weights_dtype=mask_weights_dtype)
    exact = layer.in_plain_torch(torch.float64)
    tensors = {name: value.cuda() for name, value in vars(layer).items() if isinstance(value, Tensor)}
    layer, cuda = replace(layer, **tensors), BACKENDS["cuda"]
    found = take_step(layer, cuda.prepare("train", layer.call), cuda.prepare("backward", layer.call))
    for name, tensor in found.items():
        assert_matches(tensor.cpu(), exact[name], dtype, f"{name} of {layer.call}")


def main(kernels: Sequence[str]) -> None:
    """Run everything, or only calls that launch one of `kernels`.

    "plain" includes packing, and training with library GEMMs. "backward_gemm" includes training with `tile_wgmma`.
    """
    torch.manual_seed(0)
    calls = sum(run(*case, index % 3 == 0, kernels) for index, case in enumerate(CASES))
    formats = ((x_format, name) for x_format, names in ACTIVATION_FORMATS.items() for name in names)
    stored = (pair for pair in formats if pair != ("dense", "dense"))
    calls += sum(run_stored(*pair, shape, kernels) for pair, shape in product(stored, STORED_SHAPES))
    calls += sum(run_experts(sizes, kernels) for sizes in EXPERTS)
    if not kernels or "experts_down" in kernels:
        for weight_format, tokens in product(FORMATS, (1, 5, 40)):
            run_down(weight_format, tokens)
        run_down("fp8_row", 40, 4128)  # uses split-K
    if not kernels or "plain" in kernels:
        run_packing()
        run_training(LIBRARY_STEPS)
    if not kernels or "backward_gemm" in kernels:
        run_training(TILED_STEPS)
    assert calls >= 3
    print(f"{calls} calls: correct")


if __name__ == "__main__":
    main(sys.argv[1:])
