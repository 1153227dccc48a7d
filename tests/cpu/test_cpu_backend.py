"""The choice of the CPU backend, on machines with and without a compiler."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import warnings
from pathlib import Path

import pytest
import torch

import mglu_ops
from mglu_ops import dispatch
from mglu_ops.backends import BACKENDS
from mglu_ops.backends.cpu import build, library
from mglu_ops.call import Call
from mglu_ops.files import source_directory
from mglu_ops.given import Given
from tests.support.cpu import needs_compiler, run
from tests.support.layers import make_layer

pytestmark = needs_compiler


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Makes this process forget the loaded kernels and find no compiler to build them again."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("MGLU_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(dispatch, "_prepared", {})
    dispatch.warn_of_fallback.cache_clear()


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("op", ["forward", "forward_train"])
def test_without_a_compiler_composite_runs_and_says_so_once_for_large_layers(op, monkeypatch):
    packs = {size: torch.randint(256, (size, size // 8, 2), dtype=torch.uint8) for size in (16, 512)}
    small, large = ((torch.randn(2, size), torch.randn(size, size), packed) for size, packed in packs.items())
    function = getattr(torch.ops.mglu, op)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(*small)
    message = rf"mglu::{op} runs on the backend composite: .*there is no C\+\+ compiler .*CXX=no-such-compiler"
    with pytest.warns(UserWarning, match=message):
        function(*large)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(*large)
    assert mglu_ops.explain_dispatch(*large).is_fallback


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other CPUs have one instruction set")
def test_the_processor_is_asked_for_its_instruction_sets(tmp_path):
    """The code must not use `__builtin_cpu_supports`, which is always false with `zig c++`."""
    path, source = tmp_path / "features.so", source_directory("cpu") / "features.cpp"
    options = ["-std=c++17", "-shared", "-fPIC", "-D__builtin_cpu_supports(name)=0"]
    subprocess.run([*build.find_compiler(), *options, source, "-o", path], check=True)
    functions = ctypes.CDLL(str(path))
    has = [functions[name]() & 1 for name in ("_ZN4mglu3cpu8has_avx2Ev", "_ZN4mglu3cpu10has_avx512Ev")]
    kernels = library.load()
    assert has == [kernels.supports(isa, torch.float32) for isa in ("avx2", "avx512")]
    level = torch.backends.cpu.get_cpu_capability()
    assert has == [level in ("AVX2", "AVX512"), level == "AVX512"]


def test_the_choice_and_its_override(request):
    layer = make_layer((3,), 512, 512)
    given = Given(layer.x, layer.weight, layer.packed_masks)
    assert torch.equal(dispatch.forward(given, backend="cpu"), run(layer))
    with pytest.raises(ValueError, match=r"backend: got 'cpu', .*no kernel for x torch.float64"):
        dispatch.forward(given._replace(x=layer.x.double(), weight=layer.weight.double()), backend="cpu")
    request.getfixturevalue("no_compiler")
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler"):
        BACKENDS["cpu"].prepare("forward", Call.of(given))
    with pytest.raises(ValueError, match=r"backend: got 'cpu', .*no C\+\+ compiler"):
        dispatch.forward(given, backend="cpu")


def test_small_masks_do_not_start_a_build(monkeypatch):
    """Training packs masks at every step, and small masks do not justify a build of half a minute."""
    masks = torch.rand(2, 9, 21) < 0.5
    packed = torch.ops.mglu.pack_masks(masks)
    assert isinstance(library.load(), library.Library)
    assert dispatch._packing_backend(masks) is BACKENDS["cpu"]
    monkeypatch.setattr(library, "_loaded", None)
    assert dispatch._packing_backend(masks) is None
    assert torch.equal(torch.ops.mglu.pack_masks(masks), packed)
