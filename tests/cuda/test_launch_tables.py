"""Tables of measured launches: which files are read, the errors of damaged files, and which launch wins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mglu_ops.backends.cuda import LaunchConfig, TileWgmma, launch_tables
from mglu_ops.backends.cuda.choice import LaunchChoice, choose, without_tables
from mglu_ops.backends.cuda.device import KNOWN_GPUS
from mglu_ops.backends.cuda.launch_tables import Entry, TableError
from mglu_ops.call import Call
from mglu_ops.formats import FORMATS
from mglu_ops.tuning.candidates import neighbours, starts


def contiguous(n_masks: int, tokens: int, d: int, h: int, dtype: torch.dtype = torch.bfloat16) -> Call:
    return Call.contiguous(torch.device("cuda"), dtype, n_masks, tokens, d, h)


H200 = KNOWN_GPUS[9, 0]
ENVIRONMENT = {"device": "NVIDIA H200", "compute_capability": [9, 0], "multiprocessors": 132}
CALL = contiguous(4, 1, 16384, 4096)
MODEL = without_tables(CALL, H200)
BETTER = replace(MODEL, stages=3)  # type: ignore[call-arg] # of DecodeMma


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    launch_tables._all_tables.cache_clear()
    yield
    launch_tables._all_tables.cache_clear()


def write(path: Path, config: LaunchConfig, microseconds: float = 30.0, **changes: Any) -> Path:
    environment = {**ENVIRONMENT, **changes}
    launch_tables.write(path, environment, [Entry(H200, CALL, config, microseconds, MODEL, 40.0)])
    return path


def test_tables_survive_writing_and_reading(tmp_path: Path) -> None:
    path = write(tmp_path / "table.json", BETTER)
    (entry,) = launch_tables.read(path)
    assert entry == Entry(H200, CALL, BETTER, 30.0, MODEL, 40.0, table=path)


def test_a_users_table_wins_over_the_packages_and_both_over_the_model(tmp_path, monkeypatch):
    folder = tmp_path / "tables"
    folder.mkdir()
    monkeypatch.setattr(launch_tables, "FOLDER", folder)
    monkeypatch.delenv(launch_tables.VARIABLE, raising=False)
    assert choose(CALL, H200) == LaunchChoice(MODEL, "the cost model")
    launch_tables._all_tables.cache_clear()
    write(folder / "h200.json", BETTER)
    decision = choose(CALL, H200)
    assert decision.config == BETTER
    assert decision.origin == f"the table {folder / 'h200.json'} (30 us, the model's choice 40 us)"
    launch_tables._all_tables.cache_clear()
    own = write(tmp_path / "own.json", replace(BETTER, stages=4))
    monkeypatch.setenv(launch_tables.VARIABLE, str(own))
    assert choose(CALL, H200).config == replace(BETTER, stages=4)
    assert str(own) in choose(CALL, H200).origin


def test_an_entry_serves_only_its_gpu_and_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch_tables.VARIABLE, str(write(tmp_path / "table.json", BETTER)))
    assert choose(CALL, H200).config == BETTER
    for gpu in (replace(H200, name="NVIDIA H100 80GB HBM3"), replace(H200, multiprocessors=114)):
        assert choose(CALL, gpu) == LaunchChoice(without_tables(CALL, gpu), "the cost model")
    for other in (
        contiguous(4, 1, 16384, 4096, torch.float16),
        contiguous(3, 1, 16384, 4096),
        contiguous(4, 2, 16384, 4096),
        contiguous(4, 1, 16368, 4096),
        contiguous(4, 1, 16384, 4088),
        replace(CALL, weight=replace(CALL.weight, layout=replace(CALL.weight.layout, alignment=8))),
        replace(CALL, masks=replace(CALL.masks, alignment=1)),
        replace(CALL, weight=replace(CALL.weight, format=FORMATS["fp8_row"], dtype=torch.float8_e4m3fn)),
        replace(CALL, x=replace(CALL.x, alignment=8)),
        replace(CALL, batch_invariant=True),
    ):
        found = choose(other, H200)
        assert found.origin in ("the cost model", "the batch-invariant order")
        assert found.config == without_tables(other, H200)
    for same in (replace(CALL, activation="gelu"), replace(CALL, mask_weights_dtype=torch.float32)):
        assert choose(same, H200).config == BETTER


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda t: t.update(format=2), "format: got 2, must be 1"),
        (lambda t: t.pop("environment"), "environment: got None, must be an object"),
        (lambda t: t["environment"].pop("device"), "environment: device: got None, must be a string"),
        (lambda t: t["environment"].update(compute_capability=[9]), r"got \[9\], must be \[major, minor\]"),
        (lambda t: t.update(entries={}), "entries: got {}, must be a list"),
        (lambda t: t["entries"].append("decode_mma"), "entry 1: got 'decode_mma', must be an object"),
        (lambda t: t["entries"].append(t["entries"][0]), "entry 1 .*16384 x 4096.*: is already in the table"),
        (lambda t: t["entries"][0].update(dtype="float64"), "entry 0: dtype: got 'float64'"),
        (lambda t: t["entries"][0].update(tokens="1"), "entry 0: tokens: got '1', must be a whole number"),
        (lambda t: t["entries"][0].update(n_masks=17), "n_masks must be 1 to 16"),
        (lambda t: t["entries"][0].update(microseconds=None), "microseconds: got None, must be a number"),
        (lambda t: t["entries"][0].update(microseconds=-1), "microseconds must be more than 0"),
        (lambda t: t["entries"][0]["config"].update(kernel="wonder"), "config: kernel: got 'wonder'"),
        (lambda t: t["entries"][0]["config"].update(warps=4), "config: warps: not a setting of a launch"),
        (
            lambda t: t["entries"][0]["config"].update(kernel="tile_wgmma", sparse=1),
            "config: sparse: got 1, must be true or false",
        ),
        (lambda t: t["entries"][0]["config"].update(tiles=0), "config: tiles: got 0, must be at least 1"),
        (lambda t: t["entries"][0]["config"].update(tiles=10, split_k=4), "config: 1280 threads a block, more"),
        (lambda t: t["entries"][0]["config"].update(stages=30), "bytes of shared memory a block, more than"),
        (lambda t: t["entries"][0].update(out_features=8), "rows: got 16, must be at most out_features 8"),
    ],
)
def test_a_table_that_cannot_be_used_says_where_and_why(damage: Any, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "table.json", BETTER)
    table = json.loads(path.read_text())
    damage(table)
    path.write_text(json.dumps(table))
    with pytest.raises(TableError, match=f"^{path}: .*{words}"):
        launch_tables.read(path)


def test_the_search_starts_with_every_kernel_and_way_to_multiply() -> None:
    def found(n_masks: int, tokens: int) -> list[LaunchConfig]:
        return starts(contiguous(n_masks, tokens, 8192, 2048), H200)

    assert {config.kernel for config in found(2, 1)} >= {"decode_mma", "tile_wgmma"}
    tiles = [config for config in found(8, 64) if isinstance(config, TileWgmma)]
    assert {(config.sparse, config.permuted) for config in tiles} >= {(True, False), (False, True)}


def test_files_that_are_not_tables_are_refused_at_the_first_launch(tmp_path, monkeypatch):
    for text in ("", "[1", "[]", "\x00"):
        path = tmp_path / "table.json"
        path.write_text(text)
        with pytest.raises(TableError, match=f"^{path}: "):
            launch_tables.read(path)
    monkeypatch.setenv(launch_tables.VARIABLE, str(tmp_path / "missing.json"))
    for _ in range(2):
        with pytest.raises(TableError, match=r"missing\.json: not a readable table"):
            choose(CALL, H200)


def test_the_packages_tables_are_sound_and_worth_having() -> None:
    paths = list(launch_tables.FOLDER.glob("*.json"))
    assert paths
    for path in paths:
        entries = launch_tables.read(path)
        assert entries, path
        for entry in entries:
            assert entry.microseconds <= 0.98 * entry.model_microseconds, f"{path}: {entry}"
            assert entry.config != without_tables(entry.call, entry.gpu), f"{path}: {entry}"
        environment = json.loads(path.read_text())["environment"]
        assert environment.keys() >= {"commit", "torch", "cuda", "compiler", "protocol", "device_code", "mglu_ops"}


@pytest.mark.parametrize("tokens", [1, 8, 64])
@pytest.mark.parametrize("n_masks", [1, 3, 4, 16])
def test_candidates_are_few_can_run_and_start_with_the_models_choice(n_masks: int, tokens: int) -> None:
    call = contiguous(n_masks, tokens, 14336, 4096)
    first = starts(call, H200)
    assert first[0] == without_tables(call, H200)
    assert len({config.kernel for config in first}) >= 2
    for config in first:
        around = neighbours(config, call, H200)
        assert 4 <= len(around) <= 24
        assert config not in around
        assert len(set(around)) == len(around)
        assert all(other.violation(call, H200) is None for other in around)


def test_tune_needs_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mglu_ops.__main__ import main

    out = tmp_path / "table.json"
    with pytest.raises(SystemExit):
        main(["tune", "--shapes", "64", "--out", str(out)])
    assert "got '64', must be OUTxIN" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["tune", "--shapes", "64x64", "--out", str(out)]) == 2
        assert "needs a CUDA GPU" in capsys.readouterr().err
    assert not out.exists()
