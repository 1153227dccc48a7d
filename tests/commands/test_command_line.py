"""The command line: help and version without torch, public names, and reports. test_errors.py tests errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import mglu_ops
from mglu_ops.__main__ import main
from tests.support.commands import ROOT, python, run


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_do_not_import_torch(option: str) -> None:
    done = run([sys.executable, "-X", "importtime", "-m", "mglu_ops", option])
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "mglu_ops.packaging.command" in imported
    assert not {name for name in imported if name.partition(".")[0] in ("torch", "numpy")}


def test_the_command_the_package_and_pyproject_have_one_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"mglu_ops {mglu_ops.__version__}\n"
    assert f'\nversion = "{mglu_ops.__version__}"\n' in (ROOT / "pyproject.toml").read_text()


USER_CODE = """
import torch, mglu_ops

@torch.compile(backend="eager", fullgraph=True)
def layer(x, weight, packed):
    mglu_ops.check_packed_masks(packed.to("meta"), 8)
    return torch.ops.mglu.forward(x, weight, packed) if not mglu_ops.is_batch_invariant_mode_enabled() else x

packed = torch.ops.mglu.pack_masks(torch.ones(1, 4, 8))
assert layer(torch.randn(2, 8), torch.randn(4, 8), packed).shape == (2, 4)

from mglu_ops import *
for name in mglu_ops.__all__: assert eval(name), name

def make(): return mglu_ops.nn.NaiveMGLU(8, 8), (torch.randn(2, 8),)
"""


@pytest.mark.long
def test_a_command_runs_user_code_that_uses_public_names_for_the_first_time(tmp_path: Path) -> None:
    """`python -m mglu_ops` imports the package without torch, and completes the import before it runs user code."""
    (tmp_path / "model.py").write_text(USER_CODE)
    assert python("-m", "mglu_ops", "report", f"{tmp_path}/model.py:make").startswith("1 fused, 0 missed")


def test_every_public_name_is_listed_and_another_is_an_attribute_error() -> None:
    assert {name for name in dir(mglu_ops) if not name.startswith("__")} == set(mglu_ops.__all__)
    with pytest.raises(AttributeError, match="module 'mglu_ops' has no attribute 'no_such_name'"):
        _ = mglu_ops.no_such_name


def test_a_model_without_layers_is_reported_with_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "reported.py"
    file.write_text("import torch\ndef make(): return torch.nn.Linear(4, 4), (torch.randn(2, 4),)\n")
    assert main(["report", f"{file}:make"]) == 1
    printed = capsys.readouterr().out
    assert "No MGLU layer was found." in printed
    assert "What to try:" in printed
