"""The Triton backend without a GPU: its kernels are interpreted on CPU tensors, and compiled for GPUs.

The tests of interpreted kernels and of tracing run in new processes: Triton reads TRITON_INTERPRET only when it is
imported, and tracing registers operators for the rest of the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mglu_ops.backends import BACKENDS
from mglu_ops.backends import triton as backend
from mglu_ops.backends.triton.configs import MatmulConfig, MatvecConfig, choose
from mglu_ops.call import Call
from mglu_ops.masks import pack
from tests.support.calls import unsupported
from tests.support.families import quick_cases, quick_only_for
from tests.support.layers import stored_layer

REPOSITORY = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(not backend.is_installed(), reason="triton is not installed")


def test_unsupported_reason_says_why() -> None:
    x, weight, packed = torch.ones(1, 16), torch.ones(3, 16), pack(torch.ones(1, 3, 16, dtype=torch.bool))

    def reason(x: torch.Tensor) -> str | None:
        return unsupported("triton", x, weight, packed, "silu", None)

    assert "64 tokens at most in torch.float16, got 65" in (reason(torch.ones(65, 16).half()) or "")
    assert "8 tokens at most in torch.float32, got 9" in (reason(torch.ones(9, 16)) or "")
    far = torch.empty_strided((1, 16), (16, 2**28), dtype=torch.float16, device="meta")
    assert "x: its columns lie more than" in (reason(far) or "")
    assert "float64" in (reason(x.double()) or "")
    for weight_format in ("fp8_block", "int4_group"):
        layer, _ = stored_layer(weight_format, torch.float16, 1, 3, 16, 1)
        assert f"no weight format {weight_format}, only dense, fp8_row, int8_row" in (
            unsupported("triton", *layer) or ""
        )
    if backend.is_installed():
        assert "got device cpu" in (reason(x) or "")
    else:
        assert reason(x) == "triton is not installed"


def run_tests(tests: str, **variables: str) -> None:
    """Run a file of tests, or one of its functions, in a new process."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/triton/{tests}"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_problem_has_a_launch() -> None:
    for n_masks in range(1, 17):
        for tokens in range(1, 65):
            config = choose(n_masks, tokens, wide=False)
            if isinstance(config, MatmulConfig):
                registers = (n_masks + 1) * config.block_rows * config.block_tokens / (32 * config.num_warps)
                assert registers <= 180, (n_masks, tokens)
            assert isinstance(choose(n_masks, tokens, wide=True), MatvecConfig)
    assert isinstance(choose(16, 1, wide=False), MatvecConfig)
    with pytest.raises(ValueError, match="fewer than 64 rows must have 1 or 2"):
        MatmulConfig(32, 64, 8, num_warps=4, num_stages=3)


@needs_triton
def test_fp8_needs_a_gpu_with_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton can convert fp8 only on GPUs of compute capability 8.9 or later, and integers on every GPU."""
    capabilities = {"cuda:0": (8, 0), "cuda:1": (8, 9)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[str(device)])
    for weight_format, reason in (
        ("fp8_row", "the Triton kernels for weights in fp8 need compute capability 8.9, this GPU has (8, 0)"),
        ("int8_row", None),
    ):
        call = Call.of(stored_layer(weight_format, torch.float16, 1, 3, 16, 1)[0])
        calls = [replace(call, device=torch.device(device)) for device in capabilities]
        reasons = [BACKENDS["triton"].reason("forward", one) for one in calls]
        assert [None if found is None else str(found) for found in reasons] == [reason, None]


@needs_triton
@pytest.mark.parametrize("function", quick_only_for(["::test_activations"], ["::test_activations", ""]))
def test_interpreted_kernels_agree_with_the_oracle(function: str) -> None:
    run_tests(f"triton_interpreted.py{function}", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.long
def test_a_compiler_sees_the_launch() -> None:
    run_tests("triton_traced.py")


CAPABILITIES = (80, 89, 90, 100, 120)
DENSE = [("dense", n_masks, capability) for n_masks in (1, 2, 3, 4, 8, 16) for capability in CAPABILITIES]
FP8 = [("fp8_row", 4, capability) for capability in CAPABILITIES[1:]]  # Triton converts fp8 from capability 8.9 on
INT8 = [("int8_row", 4, capability) for capability in CAPABILITIES]


@needs_triton
@pytest.mark.parametrize(
    ("weight_format", "n_masks", "capability"),
    quick_cases([("dense", 4, 90)], [*DENSE, *FP8, *INT8]),
)
def test_kernels_compile_without_spills(weight_format: str, n_masks: int, capability: int) -> None:
    """Tuned launches compile for GPUs of several generations. A few of the fastest launches spill 32 bytes."""
    from triton_compiled import compile_kernel, spills

    for tokens in (1, 8, 16, 32, 64):
        compiled = compile_kernel(n_masks, tokens, torch.bfloat16, capability, weight_format)
        assert spills(compiled) <= (0 if tokens == 1 else 32), tokens
        assert compiled.metadata.shared <= 1024 * (99 if capability in (89, 120) else 163), tokens


@needs_triton
@pytest.mark.parametrize("in_features", quick_only_for([2888], [2048, 2888]), ids=["whole steps", "a last step"])
@pytest.mark.parametrize("capability", quick_only_for([90], [90, 100]))
def test_products_of_experts_compile_to_asynchronous_loads(in_features: int, capability: int) -> None:
    from triton_compiled import compile_products_of_experts, loop_of, spills

    compiled = compile_products_of_experts("grouped_products", in_features, capability)
    assert spills(compiled) <= (0 if capability == 90 else 32)
    assert "async_copy_global_to_local" in loop_of(compiled)
    assert compiled.metadata.shared <= 1024 * 227


@needs_triton
@pytest.mark.parametrize("capability", quick_only_for([80], CAPABILITIES))
@pytest.mark.parametrize("function", ["grouped_products", "products_over_rows"])
@pytest.mark.parametrize(
    ("dtype", "tf32"),
    quick_cases([(torch.float32, True)], [(torch.float16, False), (torch.float32, False), (torch.float32, True)]),
    ids=str,
)
def test_products_of_experts_fit_every_gpu(function: str, dtype: torch.dtype, tf32: bool, capability: int) -> None:
    from triton_compiled import compile_products_of_experts, loop_of, spills

    compiled = compile_products_of_experts(function, 2048, capability, dtype, tf32)
    assert spills(compiled) <= 32
    assert "async_copy_global_to_local" in loop_of(compiled)
    assert compiled.metadata.shared <= 1024 * (227 if capability in (90, 100) else 99)


@needs_triton
@pytest.mark.parametrize("weight_format", quick_only_for(["dense"], ["dense", "fp8_row", "int8_row"]))
@pytest.mark.parametrize("n_masks", quick_only_for([4], [2, 4, 8, 16]))
def test_weights_are_decoded_and_flipped_in_registers(n_masks: int, weight_format: str) -> None:
    """The matmul kernel is fast only if weights stay in registers, which a new version of Triton could change."""
    from triton_compiled import compile_kernel, loop_of

    for tokens in (8, 16):
        loop = loop_of(compile_kernel(n_masks, tokens, torch.float16, 90, weight_format))
        assert "tt.dot" in loop
        assert "local_alloc" not in loop
        assert "convert_layout" not in loop
