"""The command `build`, which fills a cache folder for container images. With this folder, users need no compiler."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch

from mglu_ops.__main__ import main
from mglu_ops.backends import cpu
from mglu_ops.backends.cuda import compiler
from mglu_ops.backends.cuda.choice import choose
from mglu_ops.backends.cuda.device import KNOWN_GPUS
from mglu_ops.backends.cuda.kernels import quantize_x
from mglu_ops.call import Call
from tests.support.builds import CONTENT, cpu_kind, files

pytest_plugins = ["tests.support.builds"]
pytestmark = pytest.mark.usefixtures("folder")

LAYER = ["--arch", "sm_90", "--shapes", "8192x2048", "--n-masks", "4", "--tokens", "1", "64"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace NVRTC by a fake. The list names the kernels that it was asked to compile."""
    kernels: list[str] = []

    def run_nvrtc(kernel: str, arch: str, macros: dict[str, int]) -> bytes:
        kernels.append(f"{kernel} {arch}")
        return CONTENT

    monkeypatch.setattr(compiler, "has_cuda_core", lambda: True)
    monkeypatch.setattr(compiler, "_run_nvrtc", run_nvrtc)
    return kernels


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in files(folder)}


def sources(*formats: str) -> list[tuple[str, str, dict[str, int]]]:
    """The kernels that `LAYER` needs for 64 tokens. `formats` are the formats of the weight and of x."""
    call = Call.contiguous(torch.device("cuda"), torch.bfloat16, 4, 64, 8192, 2048, "silu", None, *formats)
    return [step.source for step in quantize_x.plan(choose(call, KNOWN_GPUS[9, 0]).config, call, KNOWN_GPUS[9, 0])]


def test_a_folder_for_an_image_needs_no_compiler_where_it_is_used(tmp_path, monkeypatch, capsys, compiled):
    kind = cpu_kind(tmp_path, monkeypatch, 0)
    monkeypatch.setattr(cpu.library, "Library", lambda path: path)
    out = tmp_path / "image"
    monkeypatch.chdir(tmp_path)
    assert main(["build", "--out", "image", *LAYER]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert sorted(set(compiled)) == ["decode_mma sm_90", "pack sm_90", "tile_wgmma sm_90a"]
    assert kind.builds == 1
    assert len(files(out)) == 1 + len(compiled)
    assert stat.S_IMODE(out.stat().st_mode) == 0o755
    assert modes(out) == {0o644}

    kind.remove_compiler()
    monkeypatch.setattr(compiler, "has_cuda_core", lambda: False)
    monkeypatch.setenv("MGLU_CACHE_DIR", str(out))
    assert kind.use() == CONTENT
    for source in sources("dense"):
        assert compiler.is_cached(*source)
        assert compiler.compile_cubin(*source) == CONTENT
    with pytest.raises(compiler.CompileError, match="neither is here"):
        compiler.compile_cubin("plain", "sm_90", {})


@pytest.mark.parametrize("bits", [0o700, 0o755, 0o750])
def test_a_folder_that_exists_keeps_its_mode(bits, tmp_path, compiled, capsys):
    out = tmp_path / "mine"
    out.mkdir()
    out.chmod(bits)
    (out / "notes").touch(0o600)
    assert main(["build", "--no-cpu", "--out", str(out), *LAYER]) == 0
    assert len(compiled) > 1
    assert stat.S_IMODE(out.stat().st_mode) == bits
    assert stat.S_IMODE((out / "notes").stat().st_mode) == 0o600
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.glob("*.cubin")} == {0o644}
    said = f"{out} keeps mode {bits:o}, so others cannot read it"
    assert (said in capsys.readouterr().err) == (bits != 0o755)


def test_without_out_the_cache_is_filled_and_stays_private(folder, monkeypatch, capsys, compiled):
    assert main(["build", "--no-cpu", *LAYER]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert modes(folder) == {0o600}
    count = len(compiled)
    assert main(["build", "--no-cpu", *LAYER]) == 0
    assert len(compiled) == count


@pytest.mark.parametrize("formats", [("int4_group", "dense"), ("fp8_row", "dense"), ("fp8_row", "fp8_token")], ids=str)
def test_the_kernels_of_formats(formats: tuple[str, str], compiled: list[str]) -> None:
    arguments = zip(("--weight-format", "--activation-format"), formats, strict=True)
    assert main(["build", "--no-cpu", *(word for pair in arguments for word in pair), *LAYER]) == 0
    assert all(compiler.is_cached(*source) for source in sources(*formats))
    assert not all(compiler.is_cached(*source) for source in sources("dense"))
