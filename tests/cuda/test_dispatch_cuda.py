"""The choice of kernels on a GPU, and the cache of prepared calls. Fake GPU tensors make a GPU unnecessary."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

import mglu_ops
from mglu_ops import dispatch
from mglu_ops.backends import BACKENDS, cuda, triton
from mglu_ops.backends.cuda import CudaCall, DecodeMma, TileWgmma, launch, launch_tables, tensor_map
from mglu_ops.backends.cuda.choice import choose
from mglu_ops.backends.cuda.device import KNOWN_GPUS
from mglu_ops.backends.cuda.kernels import experts_down
from mglu_ops.backends.cuda.tensor_map import MAP_BYTES, Matrix, TensorMaps
from mglu_ops.call import Call, Layout
from mglu_ops.given import Given


class OnGpu:
    """A CPU tensor that claims to be on a GPU, at an address `offset` bytes past a multiple of 16."""

    is_cuda, is_cpu = True, False
    __class__ = torch.Tensor  # for isinstance in the checks

    def __init__(self, tensor: torch.Tensor, offset: int = 0, device: str = "cuda:0") -> None:
        self.tensor = tensor
        self.offset = offset
        self.device = torch.device(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def data_ptr(self) -> int:
        return self.tensor.data_ptr() // 256 * 256 + self.offset

    def reshape(self, *shape: int) -> OnGpu:
        return OnGpu(self.tensor.reshape(*shape), self.offset)


def layer(
    tokens: int | tuple[int, ...] = 1,
    d: int = 14336,
    h: int = 4096,
    n_masks: int = 4,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """The arguments of a call. Their memory is never accessed."""
    tokens = (tokens,) if isinstance(tokens, int) else tokens
    shapes = ((*tokens, h), dtype), ((d, h), dtype), ((d, -(-h // 8), n_masks), torch.uint8)
    tensors: Any = (OnGpu(torch.empty(shape, dtype=dtype)) for shape, dtype in shapes)
    return Given(*tensors)


def explain(*sizes: Any, **options: Any) -> dispatch.Choice:
    return mglu_ops.explain_dispatch(*layer(*sizes, **options)[:5])


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    set_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(cuda, "has_cuda_core", lambda: True)
    monkeypatch.setattr(launch_tables, "_all_tables", dict)
    yield
    mglu_ops.set_batch_invariant_mode(False)


def set_gpu(monkeypatch: pytest.MonkeyPatch, arch: tuple[int, int]) -> None:
    gpu = replace(KNOWN_GPUS.get(arch, KNOWN_GPUS[8, 0]), arch=arch)
    monkeypatch.setattr(cuda, "gpu_of", lambda device: gpu)


def test_explain_names_the_kernel_its_launch_and_their_origin() -> None:
    for tokens, kernel in ((1, "decode_mma"), (8, "decode_mma"), (64, "tile_wgmma"), (5000, "tile_wgmma")):
        choice = explain(tokens)
        assert (choice.backend, choice.kernel, choice.is_fallback) == ("cuda", kernel, False)
        assert choice.launch_origin == "the cost model"
        assert str(choice).startswith(f"cuda {kernel}(")
        assert "by the cost model: the masks are applied on chip" in str(choice)
    assert "tiles=7" in str(explain(8))
    choice = explain(8, dtype=torch.float32)
    assert (choice.kernel, choice.is_fallback) == ("plain", False)  # float32 has no other kernel
    choice = explain(100, dtype=torch.float32)
    assert (choice.backend, choice.kernel) == ("composite", None)


def test_without_a_compiler_the_kernels_in_the_cache_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "has_cuda_core", lambda: False)
    monkeypatch.setattr(cuda, "is_cached", lambda kernel, arch, macros: (kernel, arch) != ("decode_mma", "sm_90"))
    assert explain(64).kernel == "tile_wgmma"
    reason = "cuda-core is not installed (pip install cuda-core), and the cache does not hold the kernel"
    assert str(BACKENDS["cuda"].reason("forward", Call.of(layer(1)))) == reason
    assert BACKENDS["cuda"].reason("forward", Call.of(layer(0))) is None
    masks: Any = OnGpu(torch.empty(4, 64, 64, dtype=torch.bool))
    assert BACKENDS["cuda"].can_pack(masks)
    monkeypatch.setattr(cuda, "is_cached", lambda *_: False)
    assert not BACKENDS["cuda"].can_pack(masks)


@pytest.mark.parametrize("is_routed", [False, True])
def test_training_needs_a_compiler_and_experts_need_triton_too(
    is_routed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Call.contiguous(torch.device("cuda:0"), torch.bfloat16, 2, 6, 64, 32)
    call = call.over_experts(4, 6, 2) if is_routed else call
    for problem in (None, "triton is not installed"):
        monkeypatch.setattr(triton, "device_reason", lambda device: problem)  # noqa: B023
        for task in ("train", "backward"):
            reason = BACKENDS["cuda"].reason(task, call)
            assert (None if reason is None else str(reason)) == (problem if is_routed else None)
    monkeypatch.setattr(cuda, "has_cuda_core", lambda: False)
    assert str(BACKENDS["cuda"].reason("train", call)) == "cuda-core is not installed (pip install cuda-core)"


@pytest.mark.parametrize("weight_format", ["dense", "fp8_row"])
def test_kernels_are_compiled_ahead_of_their_calls(weight_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly the kernels that the call will load, except for those that the cache holds."""
    compiled: list[Any] = []
    monkeypatch.setattr(cuda, "compile_cubin", lambda *source: compiled.append(source))
    monkeypatch.setattr(cuda, "is_cached", lambda *source: False)
    sizes, gpu, backend = (1024, 512), KNOWN_GPUS[9, 0], BACKENDS["cuda"]
    device, dtype = torch.device("cuda:0"), torch.bfloat16
    layer = Call.contiguous(device, dtype, 4, 256, *sizes, weight_format=weight_format)
    down = Call.contiguous(device, dtype, 0, 1, *sizes, "identity", weight_format=weight_format)
    routed = layer.over_experts(8, 3, 2)
    for task, call in (("forward", layer), ("forward", routed), ("down", down.over_experts(8, 3, 2, torch.float32))):
        compiled.clear()
        dispatch.build(task, call)
        if task == "down":
            expected = experts_down.sources(experts_down.launch_for(call, gpu), call, gpu)
        else:
            expected = [step.source for step in backend._plan(call, gpu, None)]
        assert compiled == expected != []
    first = compiled[0]
    compiled.clear()
    monkeypatch.setattr(cuda, "is_cached", lambda *source: source == first)
    dispatch.build("down", down.over_experts(8, 3, 2, torch.float32))
    assert first not in compiled


def test_explain_reads_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DecodeMma(tiles=4, block_tokens=8)
    call = Call.contiguous(torch.device("cuda:0"), torch.bfloat16, 4, 8, 14336, 4096)
    entry = launch_tables.Entry(KNOWN_GPUS[9, 0], call, config, 30.0, config, 40.0, launch_tables.FOLDER)
    key = launch_tables._key(call, KNOWN_GPUS[9, 0])
    monkeypatch.setattr(launch_tables, "_all_tables", lambda: {key: entry})
    choice = explain(8)
    assert choice.launch == config
    assert "the table" in choice.launch_origin
    assert explain(7).launch_origin == "the cost model"


def test_rounded_x_is_contiguous_for_kernels_that_do_not_multiply_in_fp8() -> None:
    formats = {"weight_format": "fp8_row", "activation_format": "fp8_token"}
    call = Call.contiguous(torch.device("cuda:0"), torch.bfloat16, 4, 8, 14336, 4096, **formats)
    call = replace(call, x=Layout((1, 8), alignment=2))
    choice = dispatch.choose("forward", call)
    assert choice.launch == choose(call.with_rounded_x(), KNOWN_GPUS[9, 0]).config
    assert ", weight in fp8_row, x rounded to fp8_token: the masks are applied" in str(choice)
    many = dispatch.choose("forward", replace(call, leading=(64,)))
    assert many.launch == choose(replace(call, leading=(64,)), KNOWN_GPUS[9, 0]).config
    assert ", weight in fp8_row, x in fp8_token: " in str(many)


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"h": 4095}, "in_features 4095 is not a multiple of 8"),
        ({"weight": 2}, "the rows of weight are not contiguous, or do not start at multiples of 16 bytes"),
        ({"packed": 1}, "the rows of packed_masks are not contiguous, or do not start at multiples of 4 bytes"),
    ],
)
def test_a_layer_that_misses_the_fast_kernels_is_a_fallback_with_its_cause(changed: dict[str, int], cause: str) -> None:
    given = layer(1, h=changed.get("h", 4096))
    given.weight.offset, given.packed_masks.offset = changed.get("weight", 0), changed.get("packed", 0)
    choice = mglu_ops.explain_dispatch(*given[:5])
    assert (choice.backend, choice.kernel, choice.is_fallback) == ("cuda", "plain", True)
    assert choice.reason == f"several times slower than by the kernels for aligned layers: {cause}"
    assert not explain(1, d=60, h=4095).is_fallback  # too small to be worth a warning


def test_a_fallback_warns_once_for_all_numbers_of_tokens(launched: list[tuple[int, ...]]) -> None:
    dispatch.warn_of_fallback.cache_clear()
    with pytest.warns(UserWarning, match="in_features 2047 is not a multiple of 8"):
        dispatch.forward(layer(1, d=256, h=2047))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tokens in (5, 9):
            dispatch.forward(layer(tokens, d=256, h=2047))


def test_older_gpus_take_few_tokens_on_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpu(monkeypatch, (8, 9))
    assert explain(512).kernel == "decode_mma"
    assert explain(513).backend == "composite"
    set_gpu(monkeypatch, (7, 5))
    monkeypatch.setattr(type(BACKENDS["triton"]), "reason", lambda backend, task, call: None)
    choice = explain(1)
    assert (choice.backend, choice.is_fallback) == ("triton", True)
    assert "compute capability (7, 5) is below 8.0" in choice.reason


def test_batch_invariant_mode_is_a_function_and_a_context_manager() -> None:
    assert not mglu_ops.is_batch_invariant_mode_enabled()
    mglu_ops.set_batch_invariant_mode(True)
    assert mglu_ops.is_batch_invariant_mode_enabled()
    with mglu_ops.set_batch_invariant_mode(False):
        assert not mglu_ops.is_batch_invariant_mode_enabled()
        with mglu_ops.set_batch_invariant_mode():
            assert mglu_ops.is_batch_invariant_mode_enabled()
        assert not mglu_ops.is_batch_invariant_mode_enabled()
    assert mglu_ops.is_batch_invariant_mode_enabled()
    mglu_ops.set_batch_invariant_mode(False)
    assert not mglu_ops.is_batch_invariant_mode_enabled()


def test_batch_invariant_order_of_sums_does_not_depend_on_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = (1, 2, 8, 9, 16, 17, 64, 600, 5000)
    small = {"d": 512, "h": 512}
    with mglu_ops.set_batch_invariant_mode():
        assert {explain(tokens, **small).kernel for tokens in counts} == {"tile_wgmma"}
        assert explain(1, **small).launch_origin == "the batch-invariant order"
        for config in ({"dtype": torch.float32}, {"h": 500}, {"d": 8}):
            launches = {str(explain(tokens, **{**small, **config}).launch) for tokens in counts}
            assert launches == {"plain(block_tokens=4)"}
        for arch in ((8, 0), (8, 9), (10, 0), (12, 0)):
            set_gpu(monkeypatch, arch)
            for n_masks in (1, 3, 8, 16):
                launches = {str(explain(tokens, n_masks=n_masks, **small).launch) for tokens in counts}
                assert len(launches) == 1
                assert "decode_mma(" in launches.pop()


def test_batch_invariant_mode_refuses_calls_that_cannot_be_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(3, 16), torch.randn(8, 16, requires_grad=True)
    packed = torch.ops.mglu.pack_masks(torch.rand(2, 8, 16) > 0.5)
    with mglu_ops.set_batch_invariant_mode():
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"set_batch_invariant_mode.*x is on cpu"):
            torch.ops.mglu.forward(x, weight, packed)
        with pytest.raises(RuntimeError, match=r"set_batch_invariant_mode.*cannot run this: training"):
            torch.ops.mglu.forward(x, weight, packed)
        with pytest.raises(RuntimeError, match=r"the backend 'composite' was asked for"):
            dispatch.forward(Given(x, weight, packed, "silu", None), backend="composite")
        with pytest.raises(RuntimeError, match=r"no kernel for x torch\.float64"):
            explain(1, dtype=torch.float64)
        set_gpu(monkeypatch, (8, 0))
        with pytest.raises(RuntimeError, match=r"300000 tokens, above 262140"):
            explain(300000, d=16, h=12)
    torch.ops.mglu.forward(x, weight, packed).sum().backward()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The result shapes of all calls, in order. Nothing is launched."""
    shapes: list[tuple[int, ...]] = []

    def run(call: CudaCall, given: Given) -> torch.Tensor:
        shapes.append(call._shape)
        return torch.empty(call._shape)

    class NoDevice:
        def __init__(self, device: int) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(CudaCall, "__call__", run)
    monkeypatch.setattr(cuda, "load", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", NoDevice)
    monkeypatch.setattr(dispatch, "_prepared", {})
    return shapes


@pytest.mark.parametrize("copied", [False, True])
def test_a_repeated_call_is_not_chosen_again(copied, launched, monkeypatch):
    """Covers calls that first copy x. test_repeated_calls.py tests the changes that need a new choice."""
    given = layer((2, 3), d=64, h=64)
    if copied:
        given = given._replace(x=OnGpu(torch.empty(3, 2, 64, dtype=torch.bfloat16).transpose(0, 1)))
    assert dispatch.repeat(given) is None
    assert dispatch.forward(given).shape == (2, 3, 64)
    monkeypatch.setattr(dispatch, "choose", None)  # another choice would raise an error
    assert dispatch.repeat(given).shape == (2, 3, 64)
    assert launched == [(2, 3, 64), (2, 3, 64)]
    with mglu_ops.set_batch_invariant_mode():
        assert dispatch.repeat(given) is None


def test_a_view_of_known_rows_is_known_from_its_second_call_on(launched: list[tuple[int, ...]]) -> None:
    given = layer(6, d=64, h=64)
    dispatch.forward(given)
    view = given._replace(x=OnGpu(given.x.tensor.view(2, 3, 64)))
    assert dispatch.repeat(view) is None
    assert dispatch.forward(view).shape == (2, 3, 64)
    result = dispatch.repeat(view)
    assert result is not None
    assert result.shape == (2, 3, 64)


def test_none_as_a_tensor_reaches_the_checks() -> None:
    for name in ("x", "weight", "packed_masks"):
        # Torch accepts None for a tensor, so `repeat` must leave None to the checks.
        assert dispatch.repeat(layer(1, d=64, h=64)._replace(**{name: None})) is None


def test_memory_is_bounded_and_shared_by_threads(launched, monkeypatch):
    monkeypatch.setattr(dispatch, "CALLS_KEPT", 8)
    calls = [layer(tokens, d=64, h=64) for tokens in range(1, 21)]

    def work() -> None:
        for _ in range(5):
            for call in calls:
                if dispatch.repeat(call) is None:
                    dispatch.forward(call)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(launched) == 4 * 5 * len(calls)
    assert len(dispatch._prepared) <= 8 + len(threads)


def test_tensor_maps_of_all_calls_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_map, "_ENTRIES_KEPT", 10)
    monkeypatch.setattr(Matrix, "encode", lambda _, pointer: bytes([pointer]))
    matrix = Matrix(2, 64, 8, 128, 64, 8, swizzle=True)
    caches = [TensorMaps(x=matrix) for _ in range(3)]
    for pointer in range(1, 60):
        assert caches[pointer % 3]({"x": pointer}) == bytes([pointer])
        assert sum(len(maps._known) for maps in caches) <= 10
    assert caches[0]({"x": 57}) == bytes([57])


class Recorder:
    """A fake launch that records its arguments."""

    calls: ClassVar[list[tuple[str, dict[str, int], bytes | None]]] = []

    def __init__(self, kernel: str, *_: Any, **__: Any) -> None:
        self.kernel = kernel

    def __call__(self, stream: int, pointers: dict[str, int], maps: bytes | None = None) -> None:
        assert stream == 7
        self.calls.append((self.kernel, pointers, maps))


@pytest.mark.parametrize(("n_masks", "permuted"), [(1, False), (8, True)])
def test_tensor_maps_are_encoded_once_for_each_address(n_masks, permuted, monkeypatch):
    """Many layers share one x, so the tensor map of x is cached apart from the maps of W and of the masks."""
    encoded: list[int] = []

    def encode(_: Matrix, pointer: int) -> bytes:
        encoded.append(pointer)
        return bytes([pointer]) * MAP_BYTES

    monkeypatch.setattr(Matrix, "encode", encode)
    monkeypatch.setattr(launch, "load_kernel", lambda _device, name, *_: name)
    monkeypatch.setattr(launch, "Launch", Recorder)
    Recorder.calls.clear()
    call = Call.contiguous(torch.device("cuda:0"), torch.float16, n_masks, 64, 14336, 4096)
    config = choose(call, KNOWN_GPUS[9, 0]).config
    assert isinstance(config, TileWgmma)
    assert config.permuted == permuted
    sequence = launch.load(config.plan(call, KNOWN_GPUS[9, 0]), 0)
    assert (sequence.workspace_bytes > 0) is permuted
    workspace = 9
    for x, weight, masks in ((1, 2, 3), (1, 2, 3), (4, 2, 3), (1, 5, 6)):
        given = {"x": x, "weight": weight, "packed_masks": masks, "mask_weights": 0, "weight_scale": 0, "out": 8}
        sequence(7, given, workspace=workspace)
        last, pointers, maps = Recorder.calls[-1]
        boxed = (weight, masks) if permuted else (x, weight, masks)
        assert (last, maps) == ("tile_wgmma", b"".join(bytes([one]) * MAP_BYTES for one in boxed))
        assert pointers == {**given, "x": workspace if permuted else x}
        if permuted:
            assert Recorder.calls[-2] == ("permute_x", {**given, "out": workspace}, None)
    assert encoded == ([2, 3, 5, 6] if permuted else [1, 2, 3, 4, 5, 6])
    assert len(Recorder.calls) == (8 if permuted else 4)
