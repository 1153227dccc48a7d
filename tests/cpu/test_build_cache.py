"""The cache of what is built where it runs: damaged files, who may write, where it is, and what is in its keys.

The compilers are stand-ins. A test with `kind` runs for the CPU library and for cubins; a test without it is of what
both share, or of one of them alone.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from build_kinds import CONTENT, artifact, cpu_kind, cuda_kind, fake_compiler, obtain, only_file, shared_folder
from hypothesis import given
from hypothesis import strategies as st
from strategies import make_layer

from mglu_ops import dispatch
from mglu_ops.backends import cache, cache_folders
from mglu_ops.backends.cpu import build, library
from mglu_ops.backends.cuda import compiler

pytest_plugins = ["build_kinds"]
pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="the CPU library is not built on Windows"),
    pytest.mark.usefixtures("folder"),
]

STRANGER = 54321
IS_ROOT = os.geteuid() == 0


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- Damaged files --------------------------------------------------------------------------------------------------


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """A function that changes bytes."""
    place, byte = draw(st.integers(0, 10**6)), draw(st.integers(1, 255))

    def flip(content: bytes) -> bytes:
        i = place % len(content)
        return content[:i] + bytes([content[i] ^ byte]) + content[i + 1 :]

    return draw(
        st.sampled_from(
            [
                flip,
                lambda content: content[: place % len(content)],
                lambda content: content[: place % len(content)] + bytes(len(content) - place % len(content)) + b"\0",
                lambda content: bytes(len(content)),
                lambda content: content + bytes([byte]),
            ]
        )
    )


@given(damage=damages())
def test_a_damaged_file_is_built_again(kind, folder, damage, capsys):
    assert kind.use() == CONTENT
    path = only_file(folder)
    builds = kind.builds
    path.write_bytes(damage(CONTENT))
    assert kind.use() == CONTENT
    assert kind.builds == builds + 1
    assert only_file(folder).read_bytes() == CONTENT
    assert f"{path} is damaged: its content does not have the checksum in its name" in capsys.readouterr().err
    cache.say.cache_clear()


def test_a_damaged_file_is_named_where_it_cannot_be_built_again(kind, folder, capsys):
    kind.use()
    path = only_file(folder)
    path.write_bytes(b"")
    kind.remove_compiler()
    with pytest.raises((build.BuildError, compiler.CompileError), match=r"no C\+\+ compiler|neither is here"):
        kind.use()
    assert f"{path} is damaged" in capsys.readouterr().err


def test_a_library_that_is_truncated_and_loaded_does_not_end_the_process(folder, monkeypatch, tmp_path):
    monkeypatch.delenv("MGLU_CACHE_DIR")
    real = build.load_library(Path)
    monkeypatch.setenv("MGLU_CACHE_DIR", str(folder))
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, f"cp {real} $out")))
    path = build.load_library(Path)
    assert path.parent == folder
    os.truncate(path, 100_000)
    assert build.load_library(library.Library).supports("portable", torch.float32)


def test_a_library_is_not_kept_where_it_could_not_be_loaded(folder, tmp_path, monkeypatch, capsys):
    real = os.statvfs

    def noexec(path: Path) -> SimpleNamespace:
        return SimpleNamespace(f_flag=os.ST_NOEXEC if Path(path) == folder else real(path).f_flag)

    monkeypatch.setattr(cache_folders.os, "statvfs", noexec)
    kind = cpu_kind(tmp_path, monkeypatch, 0)
    for _ in range(2):
        assert build.load_library(Path).parent == shared_folder()
    assert kind.builds == 1
    assert f"{folder} is on a disk that is mounted noexec; a temporary folder is used" in capsys.readouterr().err
    cuda_kind(tmp_path, monkeypatch, 0).use()
    assert only_file(folder).suffix == ".cubin"


def test_what_can_be_loaded_nowhere_is_not_kept(folder, tmp_path, monkeypatch):
    """As from a compiler for other processors."""
    kind = cpu_kind(tmp_path, monkeypatch, 0)
    with pytest.raises(cache.NoFolderError, match=r"no folder can be used for cpu-\w+: (.*(short|ELF).*){3}"):
        build.load_library(library.Library)
    assert kind.builds == 1
    assert not list(folder.iterdir())


def test_a_file_that_cannot_be_loaded_is_replaced(folder, capsys):
    """As one that was built on a machine with a later C library."""

    def load(path: Path, content: bytes) -> bytes:
        if content == b"later":
            raise OSError(f"{path}: version `GLIBC_2.99' not found")
        return content

    obtain(artifact(), lambda _: b"later")
    assert cache.obtain(artifact(), lambda _: CONTENT, load) == CONTENT
    assert only_file(folder).read_bytes() == CONTENT
    assert "GLIBC_2.99' not found; it is not used" in capsys.readouterr().err


@pytest.mark.parametrize("full", [False, True])
def test_a_folder_in_place_of_a_file_does_not_build_it_at_each_start(full, kind, folder, capsys):
    """As a container engine makes one where a file that it is to mount does not exist."""
    kind.use()
    path = only_file(folder)
    path.unlink()
    path.mkdir()
    if full:
        (path / "kept").touch()
    descriptors = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    builds = kind.builds
    for _ in range(3):
        assert kind.use() == CONTENT
    assert kind.builds == builds + 1
    assert path.is_dir() == full
    printed = capsys.readouterr().err
    assert f"{path}: Is a directory; it is not used" in printed
    assert (f"{path}: Directory not empty; a temporary folder is used instead" in printed) == full
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == descriptors


# --- Who may write --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", [0, STRANGER])
def test_the_user_and_root_are_trusted_and_nobody_else(user, monkeypatch):
    monkeypatch.setattr(cache_folders, "_user", lambda: user)
    for owner, bits, trusted in (
        (user, 0o40700, True),
        (0, 0o40755, True),
        (0, 0o40775, False),
        (user, 0o100602, False),
        (STRANGER + 1, 0o100600, False),
    ):
        status = os.stat_result((bits, 0, 0, 1, owner, 0, 0, 0, 0, 0))
        with nullcontext() if trusted else pytest.raises(OSError, match=r"a/path (is owned by|has mode)"):
            cache_folders.check_trust(Path("a/path"), status)


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_folders_and_files_are_private_whatever_the_umask(kind, umask, tmp_path, monkeypatch):
    folder = tmp_path / "above" / "cache"
    monkeypatch.setenv("MGLU_CACHE_DIR", str(folder))
    before = os.umask(umask)
    try:
        kind.use()
    finally:
        os.umask(before)
    assert mode(folder) == mode(folder.parent) == 0o700
    assert mode(only_file(folder)) == 0o600


@pytest.mark.parametrize("what", ["owner", "group", "world", "link"])
def test_a_file_that_others_can_write_is_not_loaded(kind, folder, what, capsys, tmp_path):
    kind.use()
    path = only_file(folder)
    if what == "owner":
        if not IS_ROOT:
            pytest.skip("only root can give a file away")
        os.chown(path, STRANGER, -1)
        reason = "is owned by user"
    elif what == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        reason = "it is not used"
    else:
        path.chmod(0o620 if what == "group" else 0o602)
        reason = f"has mode {0o620 if what == 'group' else 0o602:o}, with which others can write to it"
    builds = kind.builds
    assert kind.use() == CONTENT
    assert kind.builds == builds + 1
    assert reason in capsys.readouterr().err
    if what != "owner":
        assert mode(only_file(folder)) == 0o600


@pytest.mark.parametrize("what", ["owner", "group", "world"])
def test_a_folder_that_others_can_write_is_not_used(kind, folder, what, capsys):
    kind.use()
    planted = only_file(folder)
    if what == "owner":
        if not IS_ROOT:
            pytest.skip("only root can give a folder away")
        os.chown(folder, STRANGER, -1)
        reason = f"{folder} is owned by user {STRANGER} and not by 0, who runs this, or root"
    else:
        folder.chmod(0o770 if what == "group" else 0o777)
        reason = f"{folder} has mode {0o770 if what == 'group' else 0o777:o}, with which others can write to it"
    assert kind.use() == CONTENT
    assert kind.use() == CONTENT
    assert kind.builds == 2
    assert only_file(shared_folder()).name == planted.name
    assert mode(shared_folder()) == 0o700
    printed = capsys.readouterr().err
    assert printed.count(f"mglu_ops: {reason}") == 1
    assert "a temporary folder is used instead" in printed


@pytest.mark.skipif(not IS_ROOT, reason="only root can make files of root")
def test_a_folder_of_root_is_used_by_another_user(kind, folder, monkeypatch):
    """As in an image. The system keeps the user from writing to it, so that what is missing goes elsewhere."""
    kind.use()
    cache.share(folder, [folder])
    assert mode(folder) == 0o755
    assert mode(only_file(folder)) == 0o644
    monkeypatch.setattr(cache_folders, "_user", lambda: STRANGER)
    kind.remove_compiler()
    assert kind.use() == CONTENT


@pytest.mark.parametrize("what", ["link", "mode"])
def test_a_temporary_folder_that_somebody_else_made_is_not_used(folder, what, tmp_path, capsys):
    folder.mkdir(0o777)
    folder.chmod(0o777)
    if what == "link":
        (tmp_path / "target").mkdir()
        shared_folder().symlink_to(tmp_path / "target")
    else:
        shared_folder().mkdir()
        shared_folder().chmod(0o777)
    own = obtain(artifact()).parent
    assert own not in (folder, shared_folder(), tmp_path / "target")
    assert mode(own) == 0o700
    assert obtain(artifact()).parent == own
    assert ("is a symbolic link" if what == "link" else "has mode 777") in capsys.readouterr().err


# --- Where the folder is --------------------------------------------------------------------------------------------


def test_without_a_home_directory_a_temporary_folder_is_used(kind, monkeypatch, capsys):
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MGLU_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert kind.use() == kind.use() == CONTENT
    assert kind.builds == 1
    assert only_file(shared_folder()).read_bytes() == CONTENT
    printed = capsys.readouterr().err
    assert printed.count("there is no home directory to keep compiled kernels in (set MGLU_CACHE_DIR)") == 1


def test_the_variables_that_name_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, expected in (("~/here", tmp_path / "here"), ("", tmp_path / ".cache" / "mglu_ops")):
        monkeypatch.setenv("MGLU_CACHE_DIR", name)
        monkeypatch.setenv("XDG_CACHE_HOME", "ignored/unless/absolute")
        assert cache_folders.cache_directory() == expected
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folders.cache_directory() == tmp_path / "xdg" / "mglu_ops"
    monkeypatch.setenv("MGLU_CACHE_DIR", "~no-such-user/cache")
    with pytest.raises(OSError, match="MGLU_CACHE_DIR: got '~no-such-user/cache', which names no home directory"):
        cache_folders.cache_directory()
    assert obtain(artifact()).parent == shared_folder()


def test_a_relative_folder_stays_where_it_was(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MGLU_CACHE_DIR", "relative-to-the-first-use")
    path = obtain(artifact())
    monkeypatch.chdir("/")
    assert obtain(artifact()) == path == tmp_path / "relative-to-the-first-use" / path.name


@pytest.mark.parametrize("what", ["file", "read-only", "full"])
def test_a_folder_that_cannot_be_written_is_replaced(kind, folder, what, monkeypatch, capsys):
    if what == "file":
        folder.write_text("not a folder")
    elif what == "read-only":
        monkeypatch.setattr(cache.os, "access", lambda path, _: not str(path).startswith(str(folder)))
    else:
        replace = os.replace

        def full(source: Path, target: Path) -> None:
            if target.parent == folder:
                raise OSError(28, os.strerror(28), str(source))
            replace(source, target)

        monkeypatch.setattr(cache.os, "replace", full)
    assert kind.use() == CONTENT
    assert only_file(shared_folder()).read_bytes() == CONTENT
    assert "a temporary folder is used instead" in capsys.readouterr().err
    if folder.is_dir():
        assert not list(folder.iterdir())


def test_a_compiler_that_finds_the_disk_full_runs_again_elsewhere(folder, tmp_path, monkeypatch, capsys):
    body = f"case $out in {folder}*) echo 'error writing: No space left on device'; exit 1;; esac; echo library > $out"
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, body)))
    assert build.load_library(Path).parent == shared_folder()
    assert f"{folder} is on a disk that is full; a temporary folder is used instead" in capsys.readouterr().err


def test_cubins_are_compiled_and_not_kept_where_no_folder_can_be_written(tmp_path, monkeypatch, capsys):
    kind = cuda_kind(tmp_path, monkeypatch, 0)
    monkeypatch.setattr(cache.os, "access", lambda *_: False)
    assert kind.use() == CONTENT
    assert "each process compiles its CUDA kernels: no folder can be used for plain-sm_90: " in capsys.readouterr().err
    monkeypatch.setattr(library, "_loaded", None)
    assert "no folder can be used for cpu-" in str(library.load())


# --- The key --------------------------------------------------------------------------------------------------------


def test_a_complete_cache_needs_no_compiler(kind):
    kind.use()
    kind.remove_compiler()
    assert kind.use() == CONTENT
    assert kind.builds == 1


def test_what_is_found_takes_no_lock(kind, folder, monkeypatch):
    """A folder of an image may be one that nobody can write to."""
    kind.use()
    monkeypatch.setattr(cache, "locked", lambda *_: pytest.fail("a lock was taken"))
    assert kind.use() == CONTENT


def test_sources_and_options_are_in_the_key_and_the_compiler_is_not(tmp_path, monkeypatch):
    stems = set()
    for wanted in ("one-c++", "ccache one-c++", "one-c++ -O1", "other-c++ -O1"):
        monkeypatch.setenv("CXX", wanted)
        stems.add(build._artifact().stem)
    assert len(stems) == 2
    monkeypatch.setattr(build, "FLAGS", ("-O3",))
    assert build._artifact().stem not in stems
    cubins = [("plain", "sm_90", {"A": 1}), ("plain", "sm_80", {"A": 1}), ("plain", "sm_90", {"A": 2})]
    assert len({compiler._artifact(*cubin).stem for cubin in cubins}) == 3


@pytest.mark.parametrize("option", ["-march=native", "-mtune=native", "-mcpu=native"])
def test_options_that_mean_this_cpu_are_refused(option, kind, monkeypatch):
    """The folder may be shared with other CPUs, and no key tells which instructions such an option allows."""
    monkeypatch.setenv("CXX", f"ccache c++ -O2 {option}")
    monkeypatch.setattr(library, "_loaded", None)
    assert f"must not have {option}: other CPUs may find the library" in str(library.load())


def test_is_cached_looks_in_all_folders_and_makes_none(folder, tmp_path, monkeypatch):
    cubin = ("plain", "sm_90", {"A": 1})
    kind = cuda_kind(tmp_path, monkeypatch, 0)
    assert not compiler.is_cached(*cubin)
    assert not folder.exists()
    kind.use()
    assert compiler.is_cached(*cubin)
    folder.rename(shared_folder())
    assert compiler.is_cached(*cubin)
    assert not compiler.is_cached("plain", "sm_90", {"A": 2})
    shared_folder().chmod(0o777)
    assert not compiler.is_cached(*cubin)


@pytest.mark.parametrize("text", ["g++ 'unfinished", "   ", "/", "no-such-compiler -O2"])
def test_a_malformed_cxx_leaves_composite(text, monkeypatch):
    monkeypatch.setenv("CXX", text)
    if not text.strip():
        monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(library, "_loaded", None)
    layer = make_layer((3,), 512, 512)
    dispatch._warn_of_fallback.cache_clear()
    dispatch._prepared.clear()
    with pytest.warns(UserWarning, match=r"composite: .*(CXX|no C\+\+ compiler)"):
        dispatch.forward(layer.x, layer.weight, layer.packed_masks, "silu", None)
    dispatch._prepared.clear()


def test_a_compiler_that_hangs_is_stopped(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "COMPILER_SECONDS", 0.3)
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "sleep 60")))
    with pytest.raises(build.BuildError, match=r"the C\+\+ compiler did not end within 0 s: .*fake-c\+\+ -O2"):
        build.load_library(Path)
    nvcc = fake_compiler(tmp_path, "sleep 60").rename(tmp_path / "nvcc")
    monkeypatch.setenv("PATH", f"{nvcc.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(compiler, "has_cuda_core", lambda: False)
    monkeypatch.setattr(compiler, "COMPILER_SECONDS", 0.3)
    with pytest.raises(compiler.CompileError, match=r"nvcc did not end within 0 s: .*nvcc -cubin"):
        compiler.compile_cubin("plain", "sm_90", {})
    assert not list(folder.iterdir())


@pytest.mark.parametrize("op", ["forward", "forward_train"])
def test_cxx_can_be_mended_while_the_process_runs(op, tmp_path, monkeypatch):
    """Also for calls like those that were made before."""
    monkeypatch.delenv("MGLU_CACHE_DIR")
    real = build.load_library(Path)
    monkeypatch.setenv("MGLU_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(dispatch, "_prepared", {})
    monkeypatch.setattr(dispatch, "_training_calls", {})
    layer = make_layer((3,))
    for name in ("no-such-compiler", "nor-this-one"):
        monkeypatch.setenv("CXX", name)
        for _ in range(2):
            getattr(torch.ops.mglu, op)(layer.x, layer.weight, layer.packed_masks)
        assert f"CXX={name}" in str(library.load())
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, f"cp {real} $out")))
    getattr(torch.ops.mglu, op)(layer.x, layer.weight, layer.packed_masks)
    assert library.is_loaded()
    assert len(dispatch._prepared) + len(dispatch._training_calls) == 1


def test_a_refused_build_shows_the_compilers_log_and_leaves_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "echo 'line 7: what is this?'; exit 1")))
    with pytest.raises(build.BuildError, match=r"(?s)refused the CPU kernels.*line 7: what is this\?"):
        build.load_library(Path)
    assert not list(folder.iterdir())
