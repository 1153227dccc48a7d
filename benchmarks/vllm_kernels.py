"""SwiGLU in vLLM's own kernels, on the weights of the other variants: what vLLM runs for a model without masks.

A layer is one product with the gate's and the value's weights in one matrix, and then the kernel `silu_and_mul`. With
weights in fp8, `fused_experts` (Triton) and `cutlass_scaled_mm` round their inputs to fp8 too, with one scale per row.
Marlin decodes stored weights and multiplies in x's dtype. Written for vLLM 0.26.

A variant converts its weights to vLLM's layout in its first call. Importing vLLM lets Inductor compile with one thread
and changes how it divides graphs, neither of which changes its kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.layers import ExpertLayers, Layers
from benchmarks.records import version
from benchmarks.timing import Variant
from mglu_ops.formats import WeightFormat

VLLM = "SwiGLU vLLM"
"""The names of all variants begin like this."""
BLOCKS = (8, 16, 32, 48, 64)
"""The numbers of pairs from which vLLM chooses a block of Marlin's."""
BLOCKS_PER_SM = 4
"""vLLM's size of Marlin's workspace for experts, and an upper bound for one layer."""
_TYPES = {
    "fp8_row": "float8_e4m3fn",
    "fp8_block": "float8_e4m3fn",
    "int8_row": "uint8b128",
    "int4_group": "uint4b8",
}
"""Format -> the name in vLLM of the type of its numbers."""


@cache
def why_missing() -> str | None:
    """Return why vLLM's kernels cannot run here, or None if they can."""
    try:
        importlib.import_module("vllm")
        importlib.import_module("vllm._custom_ops")
    except ModuleNotFoundError as error:
        return "vLLM is not installed" if error.name == "vllm" else f"vLLM does not import: {error}"
    except Exception as error:  # an installation for another version of torch fails in many ways
        return f"vLLM does not import: {error!r}"
    return None


def _module(name: str) -> Any:
    return importlib.import_module(f"vllm.{name}")


def _ops() -> Any:
    return _module("_custom_ops")


def silu_and_mul(both: Tensor) -> Tensor:
    """The gated projection `[..., d]` of products `[..., 2 d]`, in which the gate's columns come first."""
    y = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
    torch.ops._C.silu_and_mul(y, both)
    return y


# --- Marlin -----------------------------------------------------------------------------------------------------------


class MarlinWeight(NamedTuple):
    """Stored weights of E experts in Marlin's layout.

    Attributes:
        weight: int32 `[E, h / 16, 16 n / (numbers in an int32)]`.
        scale: `[E, groups of columns, n]` in the dtype of x.
        type: vLLM's type of the stored numbers.
    """

    weight: Tensor
    scale: Tensor
    type: Any


def to_marlin(format: WeightFormat, stored: Tensor, scale: Tensor, dtype: torch.dtype) -> MarlinWeight:
    """Convert stored weights `[E, n, h]` and their scales to Marlin's layout, for x of `dtype`.

    Raises:
        ValueError: the last group of columns is not whole.
    """
    utils = _module("model_executor.layers.quantization.utils.marlin_utils")
    n, h = stored.shape[1], stored.shape[2] * format.packed
    group = format.columns or h
    if h % group:
        raise ValueError(f"Marlin: got {h} columns, must be a multiple of {group}, the columns of a scale")
    number = getattr(_module("scalar_type").scalar_types, _TYPES[format.name])
    if stored.dtype is torch.int8:
        stored = stored.view(torch.uint8) ^ 128  # uint8b128 stores w + 128; uint4b8 stores w + 8, as `int4_group` does
    # GPTQ's layout, which vLLM converts: the numbers of one int32 are neighbours in a row, lowest bits first.
    columns = (one.view(torch.int32).t().contiguous() for one in stored)
    unsorted = torch.empty(0, dtype=torch.int32, device=stored.device)
    weights = [_ops().gptq_marlin_repack(one, unsorted, h, n, number.size_bits) for one in columns]
    of_rows = scale[..., None] if format.columns is None else scale.repeat_interleave(format.rows, 1)[:, :n]
    groups = of_rows.mT.to(dtype).contiguous()
    scales = torch.stack([utils.marlin_permute_scales(one, h, n, format.columns or -1) for one in groups])
    if stored.dtype.is_floating_point:
        of_fp8 = _module("model_executor.layers.quantization.utils.marlin_utils_fp8")
        scales = of_fp8.fp8_fused_exponent_bias_into_scales(scales)
    return MarlinWeight(torch.stack(weights), scales, number)


def workspace_of(x: Tensor) -> Tensor:
    """Marlin's locks, which each kernel leaves zero."""
    utils = _module("model_executor.layers.quantization.utils.marlin_utils")
    locks: Tensor = utils.marlin_make_workspace_new(x.device, BLOCKS_PER_SM)
    return locks


def marlin_swiglu(x: Tensor, both: MarlinWeight, workspace: Tensor) -> Tensor:
    """SwiGLU with one weight in Marlin's layout."""
    size = x.shape[0], both.scale.shape[-1], x.shape[1]
    options = [None, both.weight[0], None, both.scale[0], *[None] * 5, workspace, both.type]
    return silu_and_mul(_ops().marlin_gemm(x, *options, *size, use_fp32_reduce=True))


def marlin_experts(
    x: Tensor, both: MarlinWeight, down: MarlinWeight | None, ids: Tensor, expert_weights: Tensor, workspace: Tensor
) -> Tensor:
    """SwiGLU's experts in Marlin: the first half, or with `down` the whole layer."""
    if down is not None:
        out, sums = torch.empty_like(x), lambda y, out, *_: _ops().moe_sum(y, out)
        _module("model_executor.layers.fused_moe.experts.marlin_moe").fused_marlin_moe(
            *(x, both.weight, down.weight, None, None, both.scale, down.scale, expert_weights, ids, both.type.id),
            moe_sum=sums,
            workspace=workspace,
            output=out,
        )
        return out
    (tokens, top_k), experts = ids.shape, both.weight.shape[0]
    block = next((one for one in BLOCKS if ids.numel() / experts / one < 0.9), BLOCKS[-1])
    align = _module("model_executor.layers.fused_moe.moe_align_block_size").moe_align_block_size
    places = align(ids, block, experts, None, ignore_invalid_experts=True)
    size = tokens, both.scale.shape[-1], x.shape[1]
    y = x.new_empty(ids.numel(), size[1])
    _ops().moe_wna16_marlin_gemm(
        *(x, y, both.weight, None, both.scale, *[None] * 5, workspace, *places, expert_weights),
        moe_block_size=block,
        top_k=top_k,
        mul_topk_weights=False,
        b_q_type=both.type,
        **dict(zip(("size_m", "size_n", "size_k"), size, strict=True)),
        is_k_full=True,
        use_atomic_add=False,
        use_fp32_reduce=True,
        is_zp_float=False,
    )
    return silu_and_mul(y)


# --- Products in x's dtype and in fp8 ---------------------------------------------------------------------------------


def cutlass_swiglu(x: Tensor, both: Tensor, scale: Tensor) -> Tensor:
    """SwiGLU with one fp8 weight `[2 d, h]` and scales `[2 d, 1]`, and x in fp8."""
    stored, x_scale = _ops().scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    return silu_and_mul(_ops().cutlass_scaled_mm(stored, both.t(), x_scale, scale, x.dtype))


def triton_experts(
    x: Tensor,
    both: Tensor,
    scales: Tensor | None,
    down: Tensor | None,
    down_scales: Tensor | None,
    ids: Tensor,
    expert_weights: Tensor,
) -> Tensor:
    """SwiGLU's experts as `fused_experts` computes them, in x's dtype or in fp8 with scales `[E, n, 1]`.

    Without `down`, these are the first two of its kernels with the launch that it would choose.
    """
    fused, in_fp8 = _module("model_executor.layers.fused_moe.fused_moe"), scales is not None
    if down is not None:
        config = _module("model_executor.layers.fused_moe.config")
        rows = {"per_act_token_quant": True, "per_out_ch_quant": True}
        format = config.fp8_w8a8_moe_quant_config(scales, down_scales, **rows) if in_fp8 else None
        result: Tensor = fused.fused_experts(x, both, down, expert_weights, ids, quant_config=format)
        return result
    (experts, columns, h), (tokens, top_k) = both.shape, ids.shape
    sizes = both.shape, (experts, h, columns // 2)
    launch = fused.try_get_optimal_moe_config(*sizes, top_k, "fp8_w8a8" if in_fp8 else None, tokens)
    stored, x_scale = _ops().scaled_fp8_quant(x, use_per_token_if_dynamic=True) if in_fp8 else (x, None)
    places = fused._prepare_expert_assignment(ids, launch, tokens, top_k, experts, None, ignore_invalid_experts=True)
    y = x.new_empty(tokens, top_k, columns)
    fused.invoke_fused_moe_triton_kernel(
        *(stored, both, y, x_scale, scales, expert_weights, *places, False, top_k, launch),
        compute_type=getattr(fused.tl, str(x.dtype).removeprefix("torch.")),
        use_fp8_w8a8=in_fp8,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        use_int4_w4a16=False,
        per_channel_quant=in_fp8,
    )
    return silu_and_mul(y.flatten(0, 1))


# --- Variants ---------------------------------------------------------------------------------------------------------


def _variant(
    name: str, layers: int, prepare: Callable[[int], Callable[[], Tensor]], oracle: Callable[[int], Tensor]
) -> Variant:
    """A variant whose layer i is `prepare(i)()`. The first call prepares all layers."""
    calls: list[Callable[[], Tensor]] = []

    def run(i: int) -> Tensor:
        if not calls:
            calls.extend([prepare(one) for one in range(layers)])
        return calls[i]()

    return Variant(f"{VLLM} {name}", run, layers, oracle, {"vllm": version("vllm")})


def swiglu_variants(layers: Layers) -> Iterator[Variant]:
    """SwiGLU in vLLM's kernels for the layers' format. A SwiGLU layer takes the weights of two MGLU layers."""
    x, format, count = layers.x, layers.format, len(layers.weights) // 2

    def stacked(tensors: list[Any], i: int) -> Tensor:
        return torch.cat((tensors[2 * i], tensors[2 * i + 1]))

    def linear(i: int) -> Callable[[], Tensor]:
        both = stacked(layers.weights, i)
        return lambda: silu_and_mul(F.linear(x, both))

    def cutlass(i: int) -> Callable[[], Tensor]:
        return partial(cutlass_swiglu, x, stacked(layers.weights, i), stacked(layers.scales, i)[:, None])

    def marlin(i: int) -> Callable[[], Tensor]:
        both = stacked(layers.weights, i)[None], stacked(layers.scales, i)[None]
        return partial(marlin_swiglu, x, to_marlin(format, *both, x.dtype), workspace_of(x))

    if format.is_dense:
        yield _variant("F.linear", count, linear, layers.swiglu_oracle)
        return
    if format.name == "fp8_row":
        rounded = partial(layers.swiglu_oracle, rounded=True)
        yield _variant("cutlass_scaled_mm", count, cutlass, rounded)
    yield _variant("Marlin", count, marlin, layers.swiglu_oracle)


def expert_variants(layers: ExpertLayers) -> Iterator[Variant]:
    """SwiGLU's experts in vLLM's kernels for the layers' format, with ids and weights as vLLM's router gives them."""
    x, format = layers.x, layers.format

    def routing(i: int) -> tuple[Tensor, Tensor]:
        return layers.ids[i].int(), layers.expert_weights[i].float()

    def with_column(scales: Tensor | None) -> Tensor | None:
        return None if scales is None else scales[..., None]

    def triton(i: int) -> Callable[[], Tensor]:
        both = layers.both[i], with_column(layers.both_scales[i])
        down = layers.down[i], with_column(layers.down_scales[i])
        return partial(triton_experts, x, *both, *down, *routing(i))

    def marlin(i: int) -> Callable[[], Tensor]:
        both, down = (
            None if stored is None or scales is None else to_marlin(format, stored, scales, x.dtype)
            for stored, scales in ((layers.both[i], layers.both_scales[i]), (layers.down[i], layers.down_scales[i]))
        )
        assert both is not None
        return partial(marlin_experts, x, both, down, *routing(i), workspace_of(x))

    if format.name in ("dense", "fp8_row"):
        oracle = partial(layers.oracle, n_masks=0, rounded=not format.is_dense)
        yield _variant("fused_experts", layers.count, triton, oracle)
    if not format.is_dense:
        yield _variant("Marlin", layers.count, marlin, partial(layers.oracle, n_masks=0))
