"""Launches of experts: every call has a launch that fits, and its kernels compile without spills."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace

import pytest
import torch
from test_cuda_compile import ARCHITECTURES, HOPPER, REGISTERS_PER_SM, compiled, stored_in
from test_launch_choice import Driver

from mglu_ops.backends.cuda import Plain, driver, launch
from mglu_ops.backends.cuda.device import KNOWN_GPUS, RESERVED_SHARED_BYTES_PER_BLOCK
from mglu_ops.backends.cuda.kernels import decode_mma, group_tokens
from mglu_ops.backends.cuda.kernels.experts import DecodeItems, ExpertLaunch, choose
from mglu_ops.backends.cuda.launch import parameters
from mglu_ops.backends.parameters import Parameters
from mglu_ops.call import Call
from mglu_ops.formats import FORMATS
from tests.support.families import quick_cases, quick_only_for

QWEN3_30B_A3B, MIXTRAL, GPT_OSS = (128, 768, 2048, 8), (8, 14336, 4096, 2), (32, 2880, 2880, 4)


def experts_call(
    n_masks: int,
    tokens: int,
    model: tuple[int, int, int, int] = QWEN3_30B_A3B,
    name: str = "dense",
    dtype: torch.dtype = torch.bfloat16,
    *,
    is_sorted: bool = False,
) -> Call:
    experts, d, h, top_k = model
    layer = stored_in(Call.contiguous(torch.device("cuda"), dtype, n_masks, 1, d, h), name)
    if is_sorted:
        return layer.over_experts(experts, tokens * top_k, None)
    return layer.over_experts(experts, tokens, top_k)


@pytest.mark.parametrize("arch", quick_only_for([(8, 0), (9, 0)], ARCHITECTURES), ids=str)
def test_every_call_has_a_launch_that_fits(arch: tuple[int, int]) -> None:
    gpu = KNOWN_GPUS[arch]
    models = (QWEN3_30B_A3B, MIXTRAL, GPT_OSS, (1024, 16, 64, 4), (3, 40, 16384, 2), (2, 15, 64, 1))
    for name, dtype, n_masks, tokens, model in itertools.product(
        FORMATS, (torch.bfloat16, torch.float32), (1, 4, 8, 9, 16), (1, 2, 7, 8, 40, 300, 5000), models
    ):
        plain = experts_call(n_masks, tokens, model, name, dtype)
        invariant = replace(plain, batch_invariant=True)
        for call in (plain, invariant, experts_call(n_masks, tokens, model, name, dtype, is_sorted=True)):
            launch = choose(call, gpu)
            assert launch.violation(call, gpu) is None, (call, launch)
            assert launch.grouped or call.tokens <= 64
            items = group_tokens.max_items(call, launch.item_rows) if launch.grouped else call.tokens
            blocks, config = launch.grid(call, gpu)[0] // items, launch.config
            if isinstance(config, DecodeItems):
                assert blocks == -(-model[1] // (16 * config.tiles))
                requested = config.requested_shared_bytes(launch.of_item(call), gpu) + RESERVED_SHARED_BYTES_PER_BLOCK
                assert gpu.shared_bytes_per_sm // requested == config.blocks_per_sm
            else:
                assert blocks == -(-model[1] // 8)
                assert dtype is torch.float32 or model[1] < 16


def test_an_item_has_no_more_rows_than_an_expert_can_have() -> None:
    assert [choose(experts_call(1, tokens), HOPPER).item_rows for tokens in (1, 2, 3, 8, 9, 128)] == [1, 2, 4, 8, 8, 8]
    assert [choose(experts_call(1, tokens, MIXTRAL), HOPPER).item_rows for tokens in (8, 32, 64)] == [8, 8, 16]


def test_the_batch_invariant_launch_depends_only_on_the_layer() -> None:
    for model in (QWEN3_30B_A3B, MIXTRAL, GPT_OSS):
        calls = [experts_call(4, tokens, model, is_sorted=is_sorted) for tokens in (1, 9, 200) for is_sorted in (0, 1)]
        configs = {choose(replace(one, batch_invariant=True), HOPPER).config for one in calls}
        assert len(configs) == 1


@pytest.mark.parametrize(
    ("arch", "name", "n_masks"),
    quick_cases(
        [((9, 0), "fp8_row", 8)],
        [
            *itertools.product([(8, 0)], FORMATS, (1, 8, 16)),
            *itertools.product([(9, 0)], FORMATS, (1, 4, 8, 15, 16)),
        ],
    ),
)
def test_items_compile_without_spills(arch: tuple[int, int], name: str, n_masks: int) -> None:
    gpu, seen = KNOWN_GPUS[arch], set()
    for tokens, model in itertools.product((1, 8, 64), (QWEN3_30B_A3B, MIXTRAL, GPT_OSS)):
        call = experts_call(n_masks, tokens, model, name)
        launch = choose(call, gpu)
        kernel, target, macros = launch.plan(call, gpu)[-1].source
        if (key := str(sorted(macros.items()))) in seen:
            continue
        seen.add(key)
        registers, spills, log = compiled(kernel, target, macros)
        # With 15 masks, kernels use all registers and spill a few words outside the loop, as without experts. Some
        # launches on GPUs other than Hopper spill too, because they are not tuned.
        most = 64 if arch != (9, 0) else 40 if n_masks == 15 else 0
        assert spills <= most, f"{launch}: {log}"
        assert registers * launch.config.resident_threads() <= REGISTERS_PER_SM, f"{launch}: {log}"


@pytest.mark.parametrize("arch", quick_only_for([(9, 0)], ARCHITECTURES), ids=str)
def test_other_kernels_of_experts_compile_without_spills(arch: tuple[int, int]) -> None:
    gpu = KNOWN_GPUS[arch]
    for tokens in (1, 4, 40):
        for is_sorted in (False, True):
            call = experts_call(16, tokens, dtype=torch.float32, is_sorted=is_sorted)
            for step in choose(call, gpu).plan(call, gpu):
                _, spills, log = compiled(*step.source)
                assert spills == 0, log


def test_a_dense_launch_of_the_kernel_has_no_items() -> None:
    """A macro enables the code for items, so that it costs a layer without experts nothing."""
    call = experts_call(4, 8).one
    config = decode_mma.choose(call, HOPPER)
    assert config is not None
    assert "MGLU_ITEMS" not in config.macros(call)
    assert not isinstance(config, DecodeItems)


@pytest.mark.parametrize(
    ("launch", "is_sorted", "reason"),
    [
        (ExpertLaunch(Plain(block_tokens=4), False), True, "grouped: blocks find items only in ids"),
        (ExpertLaunch(Plain(block_tokens=9), True), False, "block_tokens: got 9, must be"),
        (
            ExpertLaunch(DecodeItems(mask_group=3, block_tokens=8), True),
            False,
            "mask_group: got 3, must divide",
        ),
        (
            ExpertLaunch(DecodeItems(mask_group=4, block_tokens=32), True),
            False,
            "block_tokens: got 32, must be",
        ),
    ],
)
def test_launches_that_cannot_run(launch: ExpertLaunch, is_sorted: bool, reason: str) -> None:
    assert (launch.violation(experts_call(4, 8, is_sorted=is_sorted), HOPPER) or "").startswith(reason)


def test_what_launches_give_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels run first: one rounds x, and one groups tokens. The main kernel gets what they wrote."""
    fields = [parameters("params.cuh"), parameters("params.cuh", "GroupParams"), parameters("params.cuh")]
    second = parameters("params.cuh", "ItemParams")
    structs: list[bytes] = []

    class Recorder(Driver):
        def cuLaunchKernelEx(self, config, function, arguments, extra):  # noqa: N802
            self.size = fields[len(self.structs)].size
            if len(self.structs) == 2:
                structs.append(ctypes.string_at(arguments[1], second.size))
            return super().cuLaunchKernelEx(config, function, arguments, extra)

    recorder = Recorder(0)
    monkeypatch.setattr(driver, "_library", lambda: recorder)
    monkeypatch.setattr(launch, "load_kernel", lambda *_: driver.Kernel(b"", "mglu", 0))
    call = experts_call(4, 40, name="fp8_row")
    call = replace(call, activation_format="fp8_token", routing=replace(call.routed, index_dtype=torch.int64))
    sequence = launch.load(choose(call, HOPPER).plan(call, HOPPER), 0)
    pointers = {name: 1 + i for i, name in enumerate((*fields[0].pointers, "expert_ids", "items"))}
    rounded, table = 1 << 20, (1 << 20) + 40 * 2048 * 2
    assert sequence.workspace_bytes == 40 * 2048 * 2 + 16 * (320 // 8 + 129) + 4 * 320
    sequence(0, pointers, workspace=rounded)

    def read(packed: bytes, struct: Parameters, name: str) -> int:
        place = 8 * (struct.pointers + struct.longs).index(name) if name not in struct.ints else -1
        if place >= 0:
            return int.from_bytes(packed[place : place + 8], "little")
        place = 8 * len(struct.pointers + struct.longs) + 4 * struct.ints.index(name)
        return int.from_bytes(packed[place : place + 4], "little")

    first, group, kernel = recorder.structs
    assert (read(first, fields[0], "out"), read(group, fields[1], "out")) == (rounded, table)
    assert read(kernel, fields[2], "x") == rounded
    assert read(kernel, fields[2], "out") == pointers["out"]
    expected = {
        "items": table,
        "expert_ids": pointers["expert_ids"],
        "weight_stride": 768 * 2048,
        "mask_stride": 768 * 2048 // 8 * 4,
        "scale_stride": 768 * 4,
        "id_bytes": 8,
        "experts": 128,
        "rows": 320,
        "top_k": 8,
        "is_sorted": 0,
        "max_items": 169,
    }
    assert {name: read(structs[0], second, name) for name in expected} == expected
