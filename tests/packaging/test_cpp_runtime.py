"""A package with a copy of libstdc++ would crash Python: `export` warns of it, and `load` refuses it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mglu_ops
from mglu_ops.nn import MGLU
from mglu_ops.packaging.cpp_runtime import has_own_libstdcxx
from mglu_ops.packaging.seal import PackageError
from mglu_ops.packaging.tensor_file import write_tensor
from tests.support.commands import run
from tests.support.packaging import inputs, run_package, write_small_package

pytest_plugins = ["tests.support.packaging"]

SOURCE = """
#include <sstream>
extern "C" int digits(int number) { std::ostringstream text; text << number; return text.str().size(); }
"""

LOAD = "import sys, torch, mglu_ops; torch._inductor.aoti_load_package(sys.argv[1])"

STATIC_COMPILER = """#!/bin/sh
case " $* " in *" -shared "*) exec g++ "$@" -static-libstdc++ ;; esac
exec g++ "$@"
"""


def _has_static_libstdcxx() -> bool:
    if shutil.which("g++") is None:
        return False
    command = ["g++", "-print-file-name=libstdc++.a"]  # prints a path only if the file exists
    return "/" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


needs_static_libstdcxx = pytest.mark.skipif(not _has_static_libstdcxx(), reason="needs g++ with libstdc++.a")


def compiled(folder: Path, *flags: str) -> bytes:
    source, library = folder / "digits.cpp", folder / "digits.so"
    source.write_text(SOURCE)
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library, *flags], check=True)
    return library.read_bytes()


@needs_static_libstdcxx
@pytest.mark.parametrize(
    ("flags", "is_refused"),
    [
        pytest.param(["-static-libstdc++"], True, id="a copy"),
        pytest.param(["-Wl,--push-state,-Bdynamic,-lstdc++,--pop-state"], False, id="libstdc++.so"),
        pytest.param(["-static-libstdc++", "-Wl,--exclude-libs,ALL"], False, id="a copy that is not exported"),
    ],
)
def test_a_package_with_a_copy_of_libstdcxx_is_refused(tmp_path: Path, flags: list[str], is_refused: bool) -> None:
    package = tmp_path / "model.pt2"
    write_small_package(package, compiled(tmp_path, *flags))
    assert has_own_libstdcxx(package) == is_refused
    words = r"model\.pt2 holds a copy of libstdc\+\+.*CXX" if is_refused else "torch cannot load it"
    with pytest.raises(PackageError, match=words):
        mglu_ops.load(package)


@pytest.mark.long
@needs_static_libstdcxx
def test_export_warns_of_a_compiler_that_links_libstdcxx_statically(tmp_path: Path, library: Path) -> None:
    """Torch's loader fails on such a package in Python, but not in a C++ program."""
    compiler, package = tmp_path / "bin" / "g++", tmp_path / "model.pt2"
    compiler.parent.mkdir()
    compiler.write_text(STATIC_COMPILER)
    compiler.chmod(0o755)
    layer, x = MGLU(64, 8).eval(), inputs(3)
    with pytest.warns(UserWarning, match="Python cannot load .*set CXX"):
        mglu_ops.export(layer, (x,), package, inductor_options={"cpp.cxx": (str(compiler),)})
    with pytest.raises(PackageError, match=r"holds a copy of libstdc\+\+"):
        mglu_ops.load(package)
    in_python = run([sys.executable, "-W", "ignore", "-c", LOAD, package])
    assert in_python.returncode < 0 or "bad_cast" in in_python.stderr  # which of the two depends on GCC's version
    write_tensor(tmp_path / "x.tensor", x)
    write_tensor(tmp_path / "y.tensor", layer(x).detach())
    in_cpp = run_package(library.parent, package, tmp_path / "x.tensor", tmp_path / "y.tensor")
    assert in_cpp.returncode == 0, in_cpp.stderr
