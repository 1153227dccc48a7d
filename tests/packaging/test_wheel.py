"""The wheel is pure Python and complete, and needs only torch."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
import textwrap
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.commands import ROOT

PACKAGES = ("mglu_ops", "compile_passes")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", reason="building a wheel offline needs setuptools beside torch")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = ("pyproject.toml", "README.md", "LICENSE", "mglu_ops", "compile_passes", "csrc")
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in tracked), str(source)], check=True)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    (path,) = out.glob("*.whl")
    return path


def distributions_of(name: str) -> set[str]:
    """The names of a distribution and of all its requirements in this environment."""
    found = {"triton", "cuda-bindings", "cuda-core", "cuda-python"}  # only GPU builds of torch may need these
    left_out = set(found)
    todo = [name]
    while todo:
        current = re.split(r"[^\w.-]", todo.pop(), maxsplit=1)[0].lower().replace("_", "-")
        try:
            requires = metadata.requires(current) or []
        except metadata.PackageNotFoundError:
            continue
        if current not in found:
            found.add(current)
            todo.extend(line for line in requires if "extra ==" not in line)
    return found - left_out


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages folder as in a clean environment: torch, its requirements, and the wheel."""
    folder = tmp_path_factory.mktemp("site")
    for name in distributions_of("torch"):
        files = metadata.files(name) or []
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():  # several distributions share a namespace package
                (folder / top).symlink_to(Path(str(metadata.distribution(name).locate_file(top))))
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run_isolated(code: str, site: Path) -> str:
    """Run code in a process that finds only the packages in `site`."""
    script = f"import sys; sys.path.append({str(site)!r}); import torch\n" + textwrap.dedent(code)
    process = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, cwd=site, timeout=300
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_wheel_has_the_command_and_the_entry_points(wheel: Path) -> None:
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("entry_points.txt"))
    found = configparser.ConfigParser()
    found.read_string(zipfile.ZipFile(wheel).read(name).decode())
    assert {section: dict(found[section]) for section in found.sections()} == {
        "console_scripts": {"mglu-ops": "mglu_ops.__main__:main"},
        "torch_dynamo_backends": {"mglu": "compile_passes.backend:mglu"},
        "vllm.general_plugins": {"mglu_ops": "mglu_ops.vllm:register"},
    }


def test_wheel_is_pure_and_holds_every_module_and_the_device_code(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(p.relative_to(ROOT)) for package in PACKAGES for p in (ROOT / package).rglob("*.py")}
    device_code = {f"mglu_ops/{p.relative_to(ROOT)}" for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    assert modules <= inside, f"not in the wheel: {sorted(modules - inside)}"
    assert device_code
    assert device_code <= inside, f"not in the wheel: {sorted(device_code - inside)}"
    assert "mglu_ops/py.typed" in inside
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in inside)


@pytest.mark.long
def test_layers_run_and_are_exported_with_nothing_but_torch(site: Path, tmp_path: Path) -> None:
    """NumPy is missing too, because torch does not require it."""
    run_isolated(
        f"""
        import importlib.util
        assert not any(importlib.util.find_spec(name) for name in ("numpy", "triton", "tqdm", "safetensors", "pytest"))
        import mglu_ops
        from mglu_ops.packaging.tensor_file import write_tensor
        assert mglu_ops.__file__.startswith(sys.path[-1])
        x, w = torch.randn(3, 20, requires_grad=True), torch.randn(6, 20, requires_grad=True)
        logits = torch.randn(2, 6, 20, requires_grad=True)
        y, packed = torch.ops.mglu.forward_ste(x, w, logits)
        y.sum().backward()
        assert all(t.grad is not None for t in (x, w, logits))
        assert torch.equal(torch.ops.mglu.forward(x, w, packed), y)
        layer = mglu_ops.nn.NaiveMGLU(20, 6, n_masks=2).eval()
        expected = layer(x)
        with mglu_ops.fusion(strict=True) as report:
            torch.testing.assert_close(torch.compile(layer, backend="mglu")(x), expected)
        torch.testing.assert_close(mglu_ops.freeze(layer)(x), expected)
        x = x.detach()
        mglu_ops.export(layer, (x,), {str(tmp_path / "model.pt2")!r}, strict=True)
        torch.testing.assert_close(mglu_ops.load({str(tmp_path / "model.pt2")!r})(x), expected)
        write_tensor({str(tmp_path / "x.tensor")!r}, x)
        """,
        site,
    )
    assert (tmp_path / "x.tensor").stat().st_size == len("mglu-tensor 1 float32 3 20\n") + 4 * 60


def test_an_import_and_a_call_are_light(site: Path) -> None:
    """The import takes less than 0.2 s of a CPU, and both load no Inductor, DTensor or GPU package."""
    code = """
        import time
        start = time.process_time()
        import mglu_ops
        seconds = time.process_time() - start
        x, weight = torch.randn(3, 16), torch.randn(4, 16, requires_grad=True)
        torch.ops.mglu.forward(x, weight, torch.ops.mglu.pack_masks(torch.rand(4, 16) > 0.5)).sum().backward()
        unused = "torch._inductor", "torch.distributed.tensor", "mglu_ops.sharding", "triton", "cuda."
        heavy = [m for m in sys.modules if m.startswith(unused)]
        assert not heavy, heavy
        print(seconds)
    """
    assert any(float(run_isolated(code, site)) < 0.2 for _ in range(3))
