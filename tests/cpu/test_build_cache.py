"""The cache of artifacts that are built on the user's machine: damaged files, permissions, folders and keys.

The compilers are fakes. Tests with the fixture `kind` run for the CPU library and for cubins. Other tests cover shared
code, or one of the two.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from mglu_ops import dispatch
from mglu_ops.backends import cache
from mglu_ops.backends.cpu import build, library
from mglu_ops.backends.cuda import compiler
from tests.support.builds import (
    CONTENT,
    artifact,
    cpu_kind,
    cuda_kind,
    fake_compiler,
    files,
    obtain,
    only_file,
    shared_folder,
)
from tests.support.layers import make_layer

pytest_plugins = ["tests.support.builds"]
pytestmark = pytest.mark.usefixtures("folder")

STRANGER = 54321
IS_ROOT = os.geteuid() == 0


@pytest.fixture
def read_only() -> Path:
    """A folder in which nobody can create a file, not even root."""
    return Path("/sys")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("damaged", [b"", CONTENT[:-1], CONTENT + b"\0", bytes([CONTENT[0] ^ 1]) + CONTENT[1:]])
def test_a_damaged_file_is_built_again(damaged, kind, folder, capsys):
    assert kind.use() == CONTENT
    path = only_file(folder)
    path.write_bytes(damaged)
    assert kind.use() == kind.use() == CONTENT
    assert kind.builds == 2
    assert only_file(folder).read_bytes() == CONTENT
    message = f"{path} is damaged: its content does not have the checksum in its name"
    assert message in capsys.readouterr().err
    path.write_bytes(damaged)
    kind.remove_compiler()
    cache.say.cache_clear()
    with pytest.raises((build.BuildError, compiler.CompileError), match=r"no C\+\+ compiler|neither is here"):
        kind.use()
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_loaded_is_replaced(folder, capsys):
    """For example, a file that was built with a later C library cannot be loaded."""

    def load(path: Path, content: bytes) -> bytes:
        if content == b"later":
            raise OSError(f"{path}: version `GLIBC_2.99' not found")
        return content

    obtain(artifact(), lambda _: b"later")
    assert cache.obtain(artifact(), lambda _: CONTENT, load) == CONTENT
    assert only_file(folder).read_bytes() == CONTENT
    assert "GLIBC_2.99' not found" in capsys.readouterr().err


def test_a_folder_from_which_no_library_can_be_loaded_is_replaced(folder, capsys):
    """For example, its disk is mounted noexec. The second call finds the library where the first call has put it."""
    builds = []

    def load(path: Path, content: bytes) -> Path:
        if path.parent == folder:
            raise OSError(f"{path}: failed to map segment from shared object")
        return path

    for _ in range(2):
        assert cache.obtain(artifact(), lambda _: builds.append(1) or CONTENT, load) == only_file(shared_folder())
    assert len(builds) == 1
    assert not files(folder)
    assert f"{folder} is not used: {folder}/some-" in capsys.readouterr().err


def test_nothing_is_built_where_no_folder_runs_code(folder, monkeypatch, capsys):
    """If all disks are mounted noexec, a build of half a minute in each process would be in vain."""

    def refuse(*_: object, **options: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(cache.mmap, "mmap", refuse)
    words = r"no folder can keep some: (.*noexec.*){2}; set MGLU_CACHE_DIR to another folder"
    with pytest.raises(OSError, match=words):
        obtain(artifact(), lambda _: pytest.fail("built in vain"))
    assert not files(folder)
    assert f"{folder} is not used: the system runs no code from it" in capsys.readouterr().err
    cubin = cache.Artifact("some", ".cubin", (), "compiling it", "a second")
    assert obtain(cubin) == only_file(folder)


def test_what_can_be_loaded_nowhere_is_not_kept(folder, tmp_path, monkeypatch):
    """For example, a compiler for other processors makes a library that cannot be loaded."""
    kind = cpu_kind(tmp_path, monkeypatch, 0)
    with pytest.raises(OSError, match=r"no folder can keep cpu-\w+: (.*(short|ELF).*){2}"):
        build.load_library(library.Library)
    assert not files(folder)
    assert not files(shared_folder())
    assert kind.builds == 1


def test_a_refused_build_shows_the_compilers_log_and_leaves_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "echo 'line 7: what is this?'; exit 1")))
    with pytest.raises(build.BuildError, match=r"(?s)refused the CPU kernels.*line 7: what is this\?"):
        build.load_library(Path)
    assert not files(folder)
    assert not files(tmp_path / "tmp")


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_the_folder_and_its_files_are_private_whatever_the_umask(kind, umask, tmp_path, monkeypatch):
    folder = tmp_path / "above" / "cache"
    monkeypatch.setenv("MGLU_CACHE_DIR", str(folder))
    before = os.umask(umask)
    try:
        kind.use()
    finally:
        os.umask(before)
    assert mode(folder) == 0o700
    assert mode(only_file(folder)) == 0o600


def open_to_others(path: Path, how: str) -> str:
    """Let other users change a file or folder, and return the words of the message about it."""
    if how == "owner":
        if not IS_ROOT:
            pytest.skip("only root can give a file away")
        os.chown(path, STRANGER, -1)
        return f"{path} is owned by user {STRANGER} and not by 0, who runs this, or root"
    if how == "link":
        path.rename(path.parent.parent / "elsewhere")
        path.symlink_to(path.parent.parent / "elsewhere")
        return f"{path} is a symbolic link"
    path.chmod(mode(path) | (0o020 if how == "group" else 0o002))
    return f"{path} has mode {mode(path):o}, so others can write to it (chmod go-w makes it private)"


@pytest.mark.parametrize("how", ["owner", "group", "world", "link"])
def test_a_file_that_others_can_write_is_not_loaded(kind, folder, how, capsys):
    kind.use()
    reason = open_to_others(only_file(folder), how)
    assert kind.use() == CONTENT
    assert kind.builds == 2
    assert reason in capsys.readouterr().err
    assert mode(only_file(folder)) == 0o600
    assert not only_file(folder).is_symlink()


@pytest.mark.parametrize("how", ["owner", "group", "world"])
def test_a_folder_that_others_can_write_is_not_used(kind, folder, how, capsys):
    kind.use()
    planted = only_file(folder)
    reason = open_to_others(folder, how)
    assert kind.use() == kind.use() == CONTENT
    assert kind.builds == 2
    assert only_file(shared_folder()).name == planted.name
    assert mode(shared_folder()) == 0o700
    assert f"mglu_ops: {folder} is not used: {reason}" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["owner", "world", "link"])
def test_a_temporary_folder_that_somebody_else_made_is_not_used(folder, how):
    for path in (folder, shared_folder()):
        path.mkdir(0o700)
    reasons = open_to_others(folder, "world"), open_to_others(shared_folder(), how)
    with pytest.raises(OSError, match="no folder can keep some: ") as caught:
        obtain(artifact(), lambda _: pytest.fail("built in vain"))
    assert all(reason in str(caught.value) for reason in reasons)


@pytest.mark.skipif(not IS_ROOT, reason="only root can make files of root")
def test_a_folder_of_root_is_used_by_another_user(kind, folder, monkeypatch):
    """In a container image, root may have filled the folder that another user reads."""
    kind.use()
    folder.chmod(0o755)
    only_file(folder).chmod(0o644)
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    kind.remove_compiler()
    assert kind.use() == CONTENT


def test_the_variables_that_name_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link").symlink_to("target")
    expected = {"~/here": "here", "": ".cache/mglu_ops", str(tmp_path / "link"): "target"}
    for name, path in expected.items():
        monkeypatch.setenv("MGLU_CACHE_DIR", name)
        monkeypatch.setenv("XDG_CACHE_HOME", "ignored/unless/absolute")
        assert obtain(artifact()).parent == tmp_path / path
    monkeypatch.delenv("MGLU_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_directory() == tmp_path / "xdg" / "mglu_ops"


@pytest.mark.parametrize("chosen", ["~no-such-user/cache", ""])
def test_without_a_home_directory_a_temporary_folder_is_used(chosen, monkeypatch, capsys):
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MGLU_CACHE_DIR", chosen)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert obtain(artifact()) == only_file(shared_folder())
    expected = f"there is no home directory for {chosen or '~/.cache/mglu_ops'} (set MGLU_CACHE_DIR)"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("what", ["file", "read-only", "full"])
def test_a_folder_that_cannot_be_written_is_replaced(kind, folder, what, read_only, monkeypatch, capsys):
    if what == "file":
        folder.write_text("not a folder")
    elif what == "read-only":
        folder = read_only
        monkeypatch.setenv("MGLU_CACHE_DIR", str(folder))
    else:
        replace = os.replace

        def full(source: str, target: Path) -> None:
            if target.parent == folder:
                raise OSError(28, os.strerror(28), source)
            replace(source, target)

        monkeypatch.setattr(cache.os, "replace", full)
    assert kind.use() == kind.use() == CONTENT
    assert kind.builds == 1
    assert only_file(shared_folder()).read_bytes() == CONTENT
    assert f"mglu_ops: {folder} is not used: [Errno " in capsys.readouterr().err
    if what == "full":
        assert not files(folder)


def test_cubins_are_compiled_and_not_kept_where_no_folder_can_be_written(tmp_path, read_only, monkeypatch, capsys):
    kind = cuda_kind(tmp_path, monkeypatch, 0)
    monkeypatch.setenv("MGLU_CACHE_DIR", str(read_only))
    monkeypatch.setattr(tempfile, "tempdir", str(read_only))
    assert kind.use() == CONTENT
    assert "each process compiles its CUDA kernels: no folder can keep plain-sm_90: " in capsys.readouterr().err
    monkeypatch.setattr(library, "_loaded", None)
    assert "no folder can keep cpu-" in str(library.load())


def test_a_complete_cache_needs_neither_a_compiler_nor_a_lock(kind, monkeypatch):
    """The folder may be part of a container image, and read-only."""
    kind.use()
    kind.remove_compiler()
    monkeypatch.setattr(cache, "FileLock", lambda *_: pytest.fail("a lock was taken"))
    assert kind.use() == CONTENT
    assert kind.builds == 1


def test_sources_and_options_are_in_the_key_and_the_compiler_is_not(monkeypatch):
    stems = set()
    for wanted in ("one-c++", "ccache one-c++", "one-c++ -O1", "other-c++ -O1"):
        monkeypatch.setenv("CXX", wanted)
        stems.add(build._artifact().stem)
    assert len(stems) == 2
    monkeypatch.setattr(build, "FLAGS", ("-O3",))
    assert build._artifact().stem not in stems
    cubins = [("plain", "sm_90", {"A": 1}), ("plain", "sm_80", {"A": 1}), ("plain", "sm_90", {"A": 2})]
    assert len({compiler._artifact(*cubin).stem for cubin in cubins}) == 3


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


def test_a_command_line_becomes_one_program(tmp_path, monkeypatch):
    """Torch and CMake take the path of a program, so a script runs the command with its launcher and options.

    Torch recognises GCC by the program's name, so the script's name contains it.
    """
    compiler = fake_compiler(tmp_path, 'echo $A "$@"')
    monkeypatch.setenv("CXX", f"env A='1 2' {compiler} -m64")
    command = build.find_compiler()
    program = build.as_program(command, tmp_path / "scripts")
    assert subprocess.run([program, "x y"], capture_output=True, text=True).stdout == "1 2 -m64 x y\n"
    assert "fake-c++" in Path(program).name
    assert build.as_program(command, tmp_path / "scripts") == program
    assert build.as_program(["/usr/bin/g++"], tmp_path) == "/usr/bin/g++"
    assert only_file(tmp_path / "scripts") == Path(program)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        # Machines with other CPUs may share the folder, and the key does not say which instructions `native` means.
        *((f"ccache c++ -O2 -m{option}=native", f"must not have -m{option}=native") for option in ("arch", "cpu")),
        ("g++ 'unfinished", "must be a command line: No closing quotation"),
        ("no-such-compiler -O2", r"no C\+\+ compiler on the path \(CXX=no-such-compiler -O2\)"),
        ("/", r"no C\+\+ compiler on the path \(CXX=/\)"),
        ("   ", r"no C\+\+ compiler on the path \(c\+\+, g\+\+, clang\+\+\)"),
    ],
)
def test_a_cxx_that_cannot_be_used_is_refused_with_the_reason(text, reason, monkeypatch):
    monkeypatch.setenv("CXX", text)
    if not text.strip():
        monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(library, "_loaded", None)
    assert re.search(reason, str(library.load()))


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
    assert not files(folder)


@pytest.mark.parametrize("op", ["forward", "forward_train"])
def test_cxx_can_be_mended_while_the_process_runs(op, tmp_path, monkeypatch):
    """A new value of CXX also takes effect in calls that have run before."""
    monkeypatch.delenv("MGLU_CACHE_DIR")
    real = build.load_library(Path)
    monkeypatch.setenv("MGLU_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(dispatch, "_prepared", {})
    layer = make_layer((3,))
    for name in ("no-such-compiler", "nor-this-one"):
        monkeypatch.setenv("CXX", name)
        for _ in range(2):
            getattr(torch.ops.mglu, op)(layer.x, layer.weight, layer.packed_masks)
        assert f"CXX={name}" in str(library.load())
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, f"cp {real} $out")))
    getattr(torch.ops.mglu, op)(layer.x, layer.weight, layer.packed_masks)
    assert library.is_loaded()
    assert len(dispatch._prepared) == 1
