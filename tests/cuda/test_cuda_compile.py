"""The device code compiles for every architecture without spills. This needs no GPU.

NVRTC compiles it, as on a user's machine. On Linux, the development requirements install NVRTC.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from mglu_ops.activations import ACTIVATIONS
from mglu_ops.backends.cuda import DecodeMma, LaunchConfig, TileWgmma
from mglu_ops.backends.cuda.choice import choose, without_tables
from mglu_ops.backends.cuda.device import KNOWN_GPUS, RESERVED_SHARED_BYTES_PER_BLOCK, Gpu
from mglu_ops.backends.cuda.kernels import backward_gemm, permute_x, quantize_x, training_steps
from mglu_ops.backends.cuda.kernels.tile_wgmma_choice import fp8_launches
from mglu_ops.backends.cuda.kernels.tile_wgmma_training import training_choice
from mglu_ops.call import Call, StoredWeight
from mglu_ops.files import source_directory
from mglu_ops.formats import FORMATS
from tests.support.families import quick_cases, quick_only_for

ARCHITECTURES = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
MOST_USED = ((8, 0), (9, 0))
"""The architectures for which all cases are compiled. Others get fewer cases, as no source code is for them alone."""
USUAL_MASKS = (1, 2, 4, 8, 16)
REGISTERS_PER_SM = 65536


HOPPER = KNOWN_GPUS[9, 0]


def layer_call(
    dtype: torch.dtype,
    n_masks: int,
    tokens: int,
    shape: tuple[int, int] = (8192, 2048),
    *,
    mask_alignment: int = 16,
    x_alignment: int = 16,
    **options: Any,
) -> Call:
    call = Call.contiguous(torch.device("cuda"), dtype, n_masks, tokens, *shape, **options)
    return replace(call, masks=replace(call.masks, alignment=mask_alignment), x=replace(call.x, alignment=x_alignment))


def stored_in(call: Call, name: str) -> Call:
    """Return the call with its weight in the format `name`."""
    return replace(call, weight=StoredWeight(FORMATS[name], FORMATS[name].dtype or call.dtype, call.weight.layout))


def launch_of(call: Call, gpu: Gpu) -> Any:
    """Choose the launch of a call. Its type is Any, so that tests can read its fields after they checked its class."""
    return without_tables(call, gpu)


def compiled(kernel: str, target: str, macros: dict[str, int]) -> tuple[int, int, str]:
    """Compile a kernel for a target such as sm_90a. Returns registers per thread, spilled bytes, and the log."""
    return _compiled(kernel, target, tuple(sorted(macros.items())))[:3]


@cache
def _compiled(kernel: str, target: str, macros: tuple[tuple[str, int], ...]) -> tuple[int, int, str, str]:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC (pip install cuda-core nvidia-cuda-nvrtc)")
    source = source_directory("cuda") / f"{kernel}.cu"
    error, program = nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], [])
    assert int(error) == 0
    options = [f"-arch={target}", "-std=c++17", f"-I{source.parent}", "--ptxas-options=-v"]
    options += [f"-D{key}={value}" for key, value in macros]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = b" " * size
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    assert int(error) == 0, log.decode()
    registers, spills = (
        re.search(pattern, log.decode()) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    assert registers is not None, log.decode()
    assert spills is not None, log.decode()
    return int(registers[1]), int(spills[1]), f"{kernel} {dict(macros)}: {log.decode()}", ptx.decode()


def check(call: Call, gpu: Gpu, config: LaunchConfig | None) -> None:
    assert config is not None
    registers, spills, log = compiled(config.kernel, config.target(gpu), config.macros(call))
    # With 15 masks, the large blocks for an A100 use all registers and spill up to four words. With two masks, 128
    # tokens and one scale per group of columns, blocks spill up to five words. The main loop reads one of these words.
    most = (
        16
        if gpu.arch == (8, 0) and call.n_masks == 15
        else 20
        if call.weight.format.columns and call.n_masks == 2
        else 0
    )
    assert spills <= most, f"{config} for {gpu.arch}: {log}"
    assert "serialized" not in log, f"wgmmas wait for each other in {config}: {log}"
    assert registers * config.resident_threads() <= REGISTERS_PER_SM, f"{config}: {log}"


DECODED = {1: (1, 3, 4, 8, 16), 8: (1, 4, 7, 16), 16: (1, 3, 8, 15, 16)}
"""Maps a number of tokens to the numbers of masks that are compiled, of which GPUs other than `MOST_USED` get half."""


@pytest.mark.parametrize(
    ("name", "arch", "tokens", "n_masks"),
    quick_cases(
        [("dense", (9, 0), 1, 4), ("dense", (9, 0), 8, 7), ("fp8_block", (9, 0), 16, 15)],
        (
            (*case, n_masks)
            for case in itertools.product(FORMATS, ARCHITECTURES, DECODED)
            for n_masks in DECODED[case[2]][:: 1 if case[1] in MOST_USED else 2]
        ),
    ),
)
def test_decode_mma_compiles_without_spills(name: str, arch: tuple[int, int], tokens: int, n_masks: int) -> None:
    dtypes = (torch.float16, torch.bfloat16)
    if arch != (9, 0) or (name == "dense" and n_masks != 4):  # one dtype is enough: dtypes differ little
        dtypes = (dtypes[n_masks % 2],)
    for dtype in dtypes:
        shape = (14336, 4096) if tokens == 1 else (4096, 1024)  # long and short stages
        call = stored_in(layer_call(dtype, n_masks, tokens, shape), name)
        config = launch_of(call, KNOWN_GPUS[arch])
        assert isinstance(config, DecodeMma)
        check(call, KNOWN_GPUS[arch], config)


@pytest.mark.parametrize(("name", "tokens"), [("int4_group", 1), ("int4_group", 2), ("int8_row", 1)])
def test_decode_mma_has_barriers_only_where_x_leaves_them_room(name: str, tokens: int) -> None:
    """With a 4-bit W, x of one token takes the shared memory of the barriers, and the kernel needs none."""
    call = stored_in(layer_call(torch.bfloat16, 1, tokens), name)
    config = launch_of(call, HOPPER)
    assert isinstance(config, DecodeMma)
    *_, ptx = _compiled(config.kernel, config.target(HOPPER), tuple(sorted(config.macros(call).items())))
    assert ("mbarrier.init" in ptx) == ((name, tokens) != ("int4_group", 1))


@pytest.mark.parametrize("tokens", quick_only_for([64], [32, 64, 8192]))
@pytest.mark.parametrize("n_masks", quick_only_for([4], [1, 4, 8, 9, 16]))
def test_tile_wgmma_compiles_without_spills(n_masks: int, tokens: int) -> None:
    call = layer_call(torch.bfloat16 if n_masks == 4 else torch.float16, n_masks, tokens)
    config = launch_of(call, HOPPER)
    assert isinstance(config, TileWgmma)
    check(call, HOPPER, config)
    if config.permuted:
        compiled(permute_x.NAME, "sm_90a", permute_x.macros(config.block_tokens, config.sub))
    elif not config.sparse:  # also compile the launch for an x that TMA cannot load
        config = launch_of(layer_call(call.dtype, n_masks, tokens, x_alignment=8), HOPPER)
        assert config.permuted
        check(call, HOPPER, config)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "dense"])
def test_weights_are_decoded_first_for_many_tokens(name: str) -> None:
    """With scales per group of columns, decoding W for each tile of tokens takes longer than writing a decoded copy."""
    call = stored_in(layer_call(torch.bfloat16, 4, 8192), name)
    decoded = replace(launch_of(call, HOPPER), decoded=True, sub=1, stages=3)
    kernel = decoded.plan(call, HOPPER)[0].source
    registers, spills, log = compiled(*kernel)
    assert (kernel[0], spills) == ("decode_weight", 0), log
    assert registers <= 64, log
    if call.weight.format.columns is not None:
        assert launch_of(call, HOPPER).decoded
        assert not launch_of(replace(call, batch_invariant=True), HOPPER).decoded  # the copy rounds W
        assert not launch_of(replace(call, leading=(64,)), HOPPER).decoded
    dense = call.with_dense_weight
    assert "decoded" in str(decoded.violation(dense, HOPPER))


@pytest.mark.long  # test_expert_launches.py compiles one such kernel in the quick tests
@pytest.mark.parametrize(
    ("name", "n_masks"), [*(("fp8_row", n) for n in range(1, 17)), *(("fp8_block", n) for n in USUAL_MASKS)]
)
def test_tiles_in_fp8_compile_without_spills(name: str, n_masks: int) -> None:
    call = replace(stored_in(layer_call(torch.bfloat16, n_masks, 8192), name), activation_format="fp8_token")
    # The last launch of each kind has the most accumulators.
    widest = {(one.rows, one.mask_groups): one for one in fp8_launches(n_masks, name, HOPPER.shared_bytes_per_sm)}
    for config in widest.values():
        check(call, HOPPER, config)
        assert config.violation(call, HOPPER) is None
    assert "activation_format" in str(config.violation(replace(call, activation_format="dense"), HOPPER))


@pytest.mark.parametrize("arch", quick_only_for([(9, 0)], KNOWN_GPUS), ids=str)
def test_calls_whose_products_are_in_fp8(arch: tuple[int, int]) -> None:
    """Calls with few tokens, and calls that the fp8 kernel cannot run, multiply the rounded values in x's dtype."""
    call = replace(stored_in(layer_call(torch.bfloat16, 4, 8192), "fp8_row"), activation_format="fp8_token")
    few, wide = replace(call, leading=(4,)), replace(call, dtype=torch.float32)
    in_fp8 = [choose(one, HOPPER).config.rounds_x for one in (call, few, replace(few, batch_invariant=True), wide)]
    assert in_fp8 == [True, False, True, False]
    assert not choose(call, KNOWN_GPUS[8, 0]).config.rounds_x
    for one in (few, wide):
        config = choose(one, KNOWN_GPUS[arch]).config
        (rounding, *kernels) = quantize_x.plan(config, one, KNOWN_GPUS[arch])
        assert (kernels, rounding.kernel) == ([*config.plan(one, KNOWN_GPUS[arch])], quantize_x.NAME)
        assert compiled(*rounding.source)[1] == 0


@pytest.mark.long  # test_expert_launches.py compiles one such kernel in the quick tests
@pytest.mark.parametrize(
    ("n_masks", "tokens", "x_alignment"),  # x that is only 8-byte aligned is permuted first
    [(1, 64, 16), (2, 8192, 16), (4, 24, 16), (4, 8192, 8), (8, 64, 8), (9, 24, 16), (16, 24, 16), (16, 8192, 16)],
)
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "dense"])
def test_tile_wgmma_of_fewer_bits_compiles_without_spills(name, n_masks, tokens, x_alignment):
    for dtype in (torch.float16, torch.bfloat16) if tokens == 8192 else (torch.bfloat16,):
        call = stored_in(layer_call(dtype, n_masks, tokens, (14336, 4096), x_alignment=x_alignment), name)
        config = launch_of(call, HOPPER)
        assert isinstance(config, TileWgmma)
        check(call, HOPPER, config)


TIGHT = (2, 24), (8, 32), (9, 32), (10, 32), (11, 24), (12, 24), (13, 24), (15, 16), (16, 16), (16, 32)


@pytest.mark.parametrize(("n_masks", "tokens"), quick_cases([(16, 32)], TIGHT))
def test_sparse_tiles_compile_without_spills_where_registers_are_fewest(n_masks: int, tokens: int) -> None:
    call = layer_call(torch.bfloat16, n_masks, tokens, (14336, 4096))
    config = launch_of(call, HOPPER)
    assert config.sparse
    check(call, HOPPER, config)


@pytest.mark.long
@pytest.mark.parametrize(("n_masks", "tokens"), [(3, 64), (8, 80), (16, 64)])
def test_sparse_tiles_of_small_layers_compile_without_spills(n_masks: int, tokens: int) -> None:
    call = layer_call(torch.bfloat16, n_masks, tokens, (4096, 1024))
    chosen = launch_of(call, HOPPER)
    assert chosen.sparse
    assert chosen.block_tokens < tokens
    config = replace(chosen, cluster=2)
    assert config.violation(call, HOPPER) is None
    check(call, HOPPER, config)


@pytest.mark.parametrize("tokens", quick_only_for([32], [32, 64]))
def test_tile_wgmma_compiles_for_masks_without_a_tensor_map(tokens: int) -> None:
    call = layer_call(torch.float16, 3, tokens, mask_alignment=8)
    config = launch_of(call, HOPPER)
    assert config.sparse == (tokens == 32)
    assert config.matrices(call)[2] is None
    check(call, HOPPER, config)


TRAINED = [(tokens, weighted) for tokens in (128, 2048, 8192) for weighted in (False, True)]
"""Pairs of a number of tokens, and True for mask weights. All pairs are compiled for each of `USUAL_MASKS`, and two of
them for each other number of masks."""


@pytest.mark.parametrize(
    ("n_masks", "tokens", "weighted"),
    quick_cases(
        [(4, 8192, False)],
        ((n, *case) for n in range(1, 17) for case in (TRAINED if n in USUAL_MASKS else TRAINED[n % 3 :: 3])),
    ),
)
def test_tiles_of_training_compile_without_spills(n_masks: int, tokens: int, weighted: bool) -> None:
    shape, options = ((8192, 2048), {"mask_weights_dtype": torch.float32}) if weighted else ((14336, 4096), {})
    call = layer_call((torch.bfloat16, torch.float16)[n_masks % 2], n_masks, tokens, shape, **options)
    check(call, HOPPER, training_choice(call, HOPPER))


@pytest.mark.long
@pytest.mark.parametrize("activation", sorted(set(ACTIVATIONS) - {"silu"}))
@pytest.mark.parametrize("n_masks", [1, 8])
def test_tiles_of_training_compile_with_every_activation(n_masks: int, activation: str) -> None:
    call = layer_call(torch.bfloat16, n_masks, 8192, activation=activation)
    check(call, HOPPER, training_choice(call, HOPPER))


@pytest.mark.parametrize(
    ("arch", "dtype"),
    quick_cases(
        [((9, 0), torch.float32)],
        (
            (arch, dtype)
            for arch in ARCHITECTURES
            for dtype in (torch.float32, torch.float16, torch.bfloat16)[: 3 if arch in MOST_USED else 1]
        ),
    ),
)
@pytest.mark.parametrize("name", quick_only_for(["int4_group"], FORMATS))
def test_plain_compiles_without_spills(arch: tuple[int, int], dtype: torch.dtype, name: str) -> None:
    for n_masks, tokens in ((3, 1), (16, 4)):
        call = stored_in(layer_call(dtype, n_masks, tokens, mask_alignment=1), name)
        config = launch_of(call, KNOWN_GPUS[arch])
        assert config.kernel == "plain"
        check(call, KNOWN_GPUS[arch], config)


def _training_step_variants(
    n_masks: int, dtype: torch.dtype, activation: str, vector: bool
) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the kernels of a training step, with the macros of their largest variants, which use the most registers."""
    wide, code = torch.float32, ACTIVATIONS[activation].code
    macros = partial(training_steps.macros, MGLU_VECTOR=vector)
    yield "clear_rows", macros()
    yield "scale", macros(MGLU_ELEMENT=dtype, MGLU_ENTRIES=n_masks + 1)
    macros = partial(macros, MGLU_N_MASKS=n_masks)
    for with_weight, parts in ((True, False), (False, True)):
        yield "flip_signs", macros(MGLU_WITH_WEIGHT=with_weight, MGLU_PARTS=parts)
    macros = partial(macros, MGLU_ELEMENT=dtype)
    for weight, logits in ((dtype, dtype), (dtype, wide), (wide, wide), (None, wide)):
        yield "weight_gradients", macros(MGLU_TOTAL=wide, MGLU_GRAD_WEIGHT=weight, MGLU_GRAD_LOGITS=logits)
    yield "mask_weight_gradients", macros(MGLU_MASK_WEIGHTS=wide)
    for mask_weights in (None, wide):
        macros = partial(macros, MGLU_ACTIVATION=code, MGLU_MASK_WEIGHTS=mask_weights)
        yield "partials", macros(MGLU_PRODUCTS=wide, MGLU_TOTAL=None, MGLU_PARTS=False)
        if dtype is torch.bfloat16:
            yield "partials", macros(MGLU_PRODUCTS=dtype, MGLU_TOTAL=wide, MGLU_PARTS=False)
            yield "partials", macros(MGLU_PRODUCTS=dtype, MGLU_TOTAL=None, MGLU_PARTS=True)


STEPS = (
    (4, torch.bfloat16, "silu"),
    (7, torch.float16, "gelu_tanh"),
    (16, torch.float16, "gelu"),
    (1, torch.bfloat16, "gelu"),
    (2, torch.float16, "silu"),
    (9, torch.bfloat16, "tanh"),
)
"""Numbers of masks, dtypes and activations. Only the first three are compiled for GPUs other than `MOST_USED`."""


@pytest.mark.parametrize(
    ("arch", "n_masks", "dtype", "activation", "vector"),
    quick_cases(
        [((9, 0), *STEPS[0], True)],
        (
            (arch, *step, vector)
            for arch in (*ARCHITECTURES, (8, 6))
            for step in (STEPS if arch in MOST_USED else STEPS[:3])
            for vector in ((True, False) if arch in MOST_USED else (True,))
        ),
    ),
)
def test_training_steps_compile_without_spills(arch, n_masks, dtype, activation, vector):
    for kernel, macros in _training_step_variants(n_masks, dtype, activation, vector):
        registers, spills, log = compiled(kernel, f"sm_{arch[0]}{arch[1]}", macros)
        assert spills <= (4 if kernel == "weight_gradients" and arch >= (10, 0) else 0), log  # 7 masks spill a word
        blocks = 3 if vector else 2  # at least this many blocks must fit on an SM
        assert registers * 256 * blocks <= REGISTERS_PER_SM, log


@pytest.mark.parametrize(
    ("dtype", "n_products"),
    quick_cases(
        [(torch.bfloat16, 5)],
        [*((torch.bfloat16, n) for n in range(1, 18)), *((torch.float16, n) for n in (1, 2, 5, 17))],
    ),
)
@pytest.mark.parametrize("is_grad_x", quick_only_for([True], [True, False]))
def test_gemms_of_backward_compile_without_spills(dtype: torch.dtype, is_grad_x: bool, n_products: int) -> None:
    wide = n_products == 1 and not is_grad_x
    macros = backward_gemm.macros(dtype, n_products, is_grad_x=is_grad_x, wide=wide)
    _, _, log = compiled(backward_gemm.NAME, "sm_90a", macros)
    assert "0 bytes stack frame, 0 bytes spill stores" in log, log
    assert backward_gemm.shared_bytes() + RESERVED_SHARED_BYTES_PER_BLOCK <= HOPPER.shared_bytes_per_sm


def test_no_header_is_included() -> None:
    """Sources include only each other, so NVRTC works without a CUDA toolkit."""
    for path in source_directory("cuda").glob("*.cu*"):
        for name in re.findall(r'#include\s+([<"][^>"]+[>"])', path.read_text()):
            assert name.startswith('"'), f"{path.name} includes {name}"
            assert (source_directory("cuda") / name.strip('"')).is_file()
