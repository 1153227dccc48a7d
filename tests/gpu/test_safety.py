"""No kernel accesses memory outside its tensors, depends on other threads or streams, or breaks the CUDA context."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mglu_ops import dispatch
from mglu_ops.backends import BACKENDS
from mglu_ops.backends.cuda import CudaCall, DecodeMma, Plain, driver
from mglu_ops.backends.cuda.compiler import CompileError
from mglu_ops.backends.cuda.device import gpu_of
from mglu_ops.backends.cuda.kernels import base, permute_x
from mglu_ops.backends.cuda.kernels import pack as packing
from mglu_ops.backends.cuda.launch import load, load_kernel, parameters
from tests.support.budgets import assert_matches
from tests.support.calls import Problem, launch_of, run_on
from tests.support.layers import bands_of, between

pytestmark = pytest.mark.gpu

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
KERNELS = {"decode_mma": (6, torch.float16), "tile_wgmma": (40, torch.bfloat16), "plain": (5, torch.float32)}
"""Kernel -> number of tokens and dtype for which the backend chooses this kernel."""
if torch.cuda.is_available() and not HOPPER:
    del KERNELS["tile_wgmma"]


def problem(kernel: str, d: int, h: int, n_masks: int) -> Problem:
    """A problem for which the backend chooses `kernel`."""
    tokens, dtype = KERNELS[kernel]
    p = Problem(tokens, d, h, n_masks, dtype)
    assert launch_of(*p.given).config.kernel == kernel
    return p


@pytest.mark.parametrize("n_masks", [1, 3, 8, 16])
@pytest.mark.parametrize("shape", [(50, 520), (100, 544), (67, 41), (10564, 264)], ids=str)  # last: 6 tiles a block
@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [(1, torch.float16), *KERNELS.values(), (20, torch.bfloat16)],  # 20 tokens run sparse tiles on Hopper
)
def test_guard_bands(tokens: int, dtype: torch.dtype, shape: tuple[int, int], n_masks: int) -> None:
    """Bands of NaN (for masks, of ones) around inputs must not be used. Bands around outputs must not change."""
    p = Problem(tokens, *shape, n_masks, dtype, mask_weights_dtype=torch.float32)
    assert p.mask_weights is not None
    expected = p.run()
    p.x, p.weight, p.packed_masks = (
        between(p.x, float("nan")),
        between(p.weight, float("nan")),
        between(p.packed_masks, 255),
    )
    p.mask_weights = between(p.mask_weights, float("nan"))
    prepared = BACKENDS["cuda"].prepare("forward", p.call)
    assert isinstance(prepared, CudaCall)
    assert prepared.sequence is not None
    out = between(torch.full_like(expected, float("nan")), 7.0)
    workspace = between(torch.zeros(prepared.sequence.workspace_bytes, dtype=torch.uint8, device="cuda"), 7)
    p.launch(prepared.sequence, out, workspace)
    assert torch.equal(out, expected)
    assert bool((bands_of(out) == 7.0).all())
    assert bool((bands_of(workspace) == 7).all())


@pytest.mark.parametrize("shape", [(3, 33, 72), (16, 5, 37), (1, 7, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.float32])
def test_guard_bands_of_packing(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    masks = torch.rand(shape, device="cuda") < 0.5
    source = between(masks if dtype is torch.bool else (masks.float() - 0.5).to(dtype), 1)
    expected = packing.pack(masks, torch.cuda.get_device_capability(), torch.cuda.current_stream().cuda_stream)
    out = between(torch.zeros_like(expected), 7)
    arch = torch.cuda.get_device_capability()
    launch = packing._launch(0, arch, source.dtype, (1, *shape), (0, *source.stride()), vector=False)
    launch(torch.cuda.current_stream().cuda_stream, {"source": source.data_ptr(), "packed": out.data_ptr()})
    assert torch.equal(out, expected)
    assert bool((bands_of(out) == 7).all())


@pytest.mark.alone(gibibytes=24)
@pytest.mark.parametrize("kernel", KERNELS)
def test_more_than_2_31_weights(kernel: str) -> None:
    tokens, dtype = KERNELS[kernel]
    d, h = 2**19 + 16, 4096
    x = torch.randn(tokens, h, device="cuda").to(dtype)
    weight = torch.empty(d, h, dtype=dtype, device="cuda").normal_(0, h**-0.5)
    packed = torch.randint(0, 256, (d, h // 8, 4), dtype=torch.uint8, device="cuda")
    config = launch_of(x, weight, packed, "silu", None).config
    assert config.kernel == kernel
    out = run_on("cuda", x, weight, packed, "silu", None)
    tail = run_on("cuda", x, weight[-256:].clone(), packed[-256:].clone(), "silu", None, launch=config)
    assert torch.equal(out[:, -256:], tail)


@pytest.mark.alone(gibibytes=24)
@pytest.mark.parametrize(
    ("tokens", "d", "h", "config"),
    [
        pytest.param(512, 16, 2**22 + 8, Plain(block_tokens=4), id="x, plain"),
        pytest.param(
            2**19 + 3, 64, 4096, None, id="x, tile_wgmma", marks=pytest.mark.skipif(not HOPPER, reason="wgmma")
        ),
        pytest.param(2**16 + 5, 2**15 + 64, 64, None, id="out", marks=pytest.mark.skipif(not HOPPER, reason="wgmma")),
    ],
)
def test_more_than_2_31_elements_of_x_and_of_the_result(tokens, d, h, config):
    assert tokens * max(d, h) > 2**31
    x = torch.empty(tokens, h, dtype=torch.bfloat16, device="cuda").normal_()
    weight = torch.empty(d, h, dtype=torch.bfloat16, device="cuda").normal_(0, h**-0.5)
    packed = torch.randint(0, 256, (d, h // 8, 1), dtype=torch.uint8, device="cuda")
    out = run_on("cuda", x, weight, packed, "silu", None, launch=config)
    tail = run_on("cuda", x[-40:].clone(), weight, packed, "silu", None, launch=config)
    assert torch.equal(out[-40:], tail)


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Run `work(0)` to `work(count - 1)` in parallel threads, and raise an error that any of them raises."""
    raised: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


@pytest.mark.parametrize("streams", ["one each", "one for all"])
def test_streams_and_threads(streams: str) -> None:
    """Threads call the operator with separate tensors, and then with shared tensors."""
    problems = [problem(kernel, 128, 256, 1 + i) for i, kernel in enumerate(KERNELS)]
    expected = [p.run() for p in problems]
    torch.cuda.synchronize()
    shared = torch.cuda.Stream()

    def work(index: int) -> None:
        with torch.no_grad(), torch.cuda.stream(shared if streams == "one for all" else torch.cuda.Stream()):
            for i in range(100):
                which = (index + i // 50) % len(problems)
                p = problems[which]
                assert torch.equal(torch.ops.mglu.forward(p.x, p.weight, p.packed_masks), expected[which])

    in_threads(work, len(problems))


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_first_operation_of_a_thread(kernel: str) -> None:
    """The first thread loads the kernel into the process, and the second one uses a kernel that is already loaded."""
    p = problem(kernel, 144, 264, 4)
    found: list[Tensor] = []
    for _ in range(2):
        in_threads(lambda _: found.append(p.run()), 1)
    torch.cuda.synchronize()
    assert torch.equal(found[0], found[1])
    p.check()


FIRST_CALLS = """
import sys, threading, torch
from mglu_ops import dispatch
from mglu_ops.given import Given
x = torch.randn(1, 64, device="cuda").half()
weight, masks = torch.randn(32, 64, device="cuda").half(), torch.randint(256, (32, 64), device="cuda").byte()
calls = [(x, weight, masks[:, : 8 * n].reshape(32, 8, n)) for n in range(1, 9)]
assert "cuda.core" not in sys.modules
start, failed = threading.Barrier(len(calls)), []
def work(call):
    start.wait()
    try:
        dispatch.forward(Given(*call), backend="cuda")
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=work, args=(call,)) for call in calls]
for thread in threads: thread.start()
for thread in threads: thread.join()
torch.cuda.synchronize()
sys.exit(str(failed) if failed else 0)
"""


def test_first_calls_of_a_process_at_once(tmp_path: Path) -> None:
    """Eight threads each call a kernel that must be compiled."""
    environment = {**os.environ, "MGLU_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", FIRST_CALLS]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert len(list(tmp_path.glob("*.cubin"))) == 8


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


@needs_two_gpus
@pytest.mark.parametrize("backend", ["cuda", "triton", "composite"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_tensors_on_another_gpu(kernel: str, backend: str) -> None:
    """The tensors are not on the current GPU. Covers first calls, which compile and load kernels."""
    with torch.cuda.device(1):
        p = problem(kernel, 152, 264, 4)
        logits = p.masks.to(p.x.dtype) - 0.5
    assert torch.equal(torch.ops.mglu.pack_masks(p.masks), p.packed_masks)
    assert torch.equal(torch.ops.mglu.pack_logits(logits), p.packed_masks)
    result = dispatch.forward(p.given, backend=backend)
    assert torch.cuda.current_device() == 0
    assert result.device == p.x.device == torch.device("cuda", 1)
    assert_matches(result, p.oracle(), p.x.dtype)
    p.x.requires_grad_()
    y, _ = torch.ops.mglu.forward_ste(p.x, p.weight, logits, p.activation)
    (found,) = torch.autograd.grad(y.sum(), p.x)
    assert_matches(y, p.oracle(), p.x.dtype)
    assert found.device == p.x.device


@needs_two_gpus
def test_threads_on_two_gpus_at_once() -> None:
    problems = []
    for device in (0, 1):
        with torch.cuda.device(device):
            problems += [problem(kernel, 128, 256, 1 + i) for i, kernel in enumerate(KERNELS)]
    expected = [p.run() for p in problems]

    def work(index: int) -> None:
        """Alternate between tensors on two GPUs. The thread's current GPU stays the same."""
        with torch.no_grad(), torch.cuda.device(index % 2):
            for i in range(200):
                which = (index + i) % len(problems)
                p = problems[which]
                assert torch.equal(torch.ops.mglu.forward(p.x, p.weight, p.packed_masks), expected[which])

    in_threads(work, 4)
    for device in (0, 1):
        torch.cuda.synchronize(device)


def test_a_failed_compile_has_the_log_and_leaves_the_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MGLU_CACHE_DIR", str(tmp_path))
    p = Problem(1, 64, 256, 8)
    with pytest.raises(CompileError, match="kMaskGroup divides kMasks"):
        load(DecodeMma(mask_group=5, block_tokens=8).plan(p.call, gpu_of(0)), 0)
    p.check()
    with pytest.raises(ValueError, match="mask_group: got 5, must divide n_masks 8 into whole words"):
        p.run(DecodeMma(mask_group=5, block_tokens=8))
    with pytest.raises(ValueError, match=r"aligned rows|multiple of 8"):
        Problem(20, 64, 257, 8).run(DecodeMma(mask_group=8, block_tokens=8))


def test_a_failed_launch_says_why_and_leaves_the_context() -> None:
    p = Problem(6, 64, 256, 8)
    p.check()
    too_deep = DecodeMma(tiles=4, stages=60, mask_group=8, block_tokens=8)
    for _ in range(2):  # the failure leaves no partial state
        with pytest.raises(driver.LaunchError, match=r"mglu_decode_mma: \d+ bytes of shared memory: CUDA error 1 "):
            load(too_deep.plan(p.call, gpu_of(0)), 0)
        p.check()
    kernel = load_kernel(0, "permute_x", "sm_90a" if HOPPER else "sm_80", permute_x.macros(8, 1))
    fields = parameters("params.cuh")
    integers = base.integers(p.call)
    launch = driver.Launch(kernel, (1, 1), 4096, 0, overlap=False, parameters=fields, integers=integers)
    with pytest.raises(KeyError, match="x"):
        launch(torch.cuda.current_stream().cuda_stream, {})
    with pytest.raises(driver.LaunchError, match="launching mglu_permute_x: CUDA error"):
        launch(torch.cuda.current_stream().cuda_stream, dict.fromkeys(fields.pointers, 0))
    torch.cuda.synchronize()
    p.check()


def test_an_invalid_module_is_reported_and_leaves_the_context() -> None:
    with pytest.raises(driver.LaunchError, match="loading mglu_nothing: CUDA error"):
        driver.Kernel(b"\0" * 64, "mglu_nothing", 0)
    Problem(1, 64, 256, 8).check()
