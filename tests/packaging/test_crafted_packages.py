"""Packages that were made to do harm end in a PackageError before anything of them is extracted, inflated or run.

Each package has a right seal, because whoever crafts one can write it. Python and the C++ library use the same words.
"""

from __future__ import annotations

import copy
import ctypes
import json
import os
import struct
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import strategies as s
import torch
from crafted_packages import (
    FOLDER,
    INFO,
    INPUT,
    LAYER,
    WEIGHT,
    Member,
    archive,
    described,
    description,
    good_members,
    package_with,
    sealed,
)
from hypothesis import given
from hypothesis import strategies as st
from library_fixtures import needs_compiler

import mglu_ops
from mglu_ops.packaging.archive import opened, read_members
from mglu_ops.packaging.package import KEY, PackageError, read_info

pytest_plugins = ["library_fixtures"]

Words = Callable[[bytes], str]
"""What Python and C++ say of a package; empty if they find nothing wrong."""


def in_python(check: Callable[[Path], object], path: Path) -> str:
    try:
        check(path)
    except PackageError as error:
        words = str(error)
        assert words.startswith(f"{path}: ")
        words.encode()  # can be printed
        return words.removeprefix(f"{path}: ")
    return ""


@pytest.fixture
def words(tmp_path: Path) -> Words:
    """What Python says."""

    def words_of(data: bytes) -> str:
        path = tmp_path / "crafted.pt2"
        path.write_bytes(data)
        return in_python(read_info, path)

    return words_of


@pytest.fixture
def words_of_both(words: Words, tmp_path: Path, library: Path) -> Words:
    """What both say: C++ must say the same as Python."""
    check = ctypes.CDLL(str(library)).mglu_check_package
    check.restype = ctypes.c_char_p

    def words_of(data: bytes) -> str:
        said = words(data)
        path = tmp_path / "crafted.pt2"
        in_cpp = check(str(path).encode(), None, None)
        assert (in_cpp or b"").decode() == (f"{path}: {said}" if said else "")
        return said

    return words_of


def with_member(**changes: Any) -> bytes:
    return sealed([*good_members(), Member(**{"name": FOLDER + b"more.txt", "data": b"more", **changes})])


# --- Archives -------------------------------------------------------------------------------------------------------

BAD_NAMES = [
    FOLDER + b"../../../../../outside",
    b"../outside",
    b"..",
    b"model/..",
    b"model/./x",
    b"/tmp/outside",
    b"//host/outside",
    b"model//x",
    b"model/folder/",
    b"",
    b"model\\..\\..\\outside",
    b"C:/outside",
    b"c:outside",
    b"model/x\0.so",
    b"model/x\n",
    b"model/\x7f",
]

DAMAGED_ARCHIVES = {
    "compressed": (with_member(method=8), "data/aotinductor/model/more.txt' is compressed (method 8), must be stored"),
    "another size": (with_member(size=1 << 20, method=8), "is compressed"),
    "too large": (with_member(size=1 << 20), "overlaps another one, or lies outside of the file"),
    "outside": (with_member(offset=1 << 20), "overlaps another one, or lies outside of the file"),
    "far outside": (
        with_member(offset=0xFFFFFFFF, extra=struct.pack("<2HQ", 1, 8, (1 << 64) - 1)),
        "overlaps another one, or lies outside of the file",
    ),
    "no 64 bits": (with_member(offset=0xFFFFFFFF), "its zip directory is damaged"),
    "half an extra field": (with_member(extra=b"\1\0\xff"), "its zip directory is damaged"),
    "two extra fields": (with_member(extra=struct.pack("<2HQ", 1, 8, 5) * 2), "its zip directory is damaged"),
    "overlap": (with_member(offset=0), "has another name, method or flags in the header before its bytes"),
    "shared bytes": (
        sealed([*good_members(), Member(FOLDER + b"x", b"x"), Member(FOLDER + b"x", b"x", offset=0)]),
        "has another name, method or flags in the header before its bytes",
    ),
    "twice": (with_member(name=FOLDER + b"code.wrapper.so"), "code.wrapper.so' is there twice"),
    "twice but for case": (with_member(name=FOLDER + b"CODE.wrapper.so"), "differs from another only in case"),
    "encrypted": (with_member(flags=1), "has the flags 0x0001: it is encrypted"),
    "link": (with_member(attributes=0o120777 << 16), "is a link or a special file"),
    "device": (with_member(attributes=0o020666 << 16), "is a link or a special file"),
    "another name inside": (with_member(local_name=b"../" * 12 + b"a"), "has another name, method or flags"),
    "compressed inside": (with_member(local_method=8), "has another name, method or flags"),
    "fewer members": (sealed(good_members(), count=1), "its zip directory is damaged"),
    "more members": (sealed(good_members(), count=3), "its zip directory is damaged"),
    "directory elsewhere": (sealed(good_members(), start=7), "its zip directory is damaged"),
    "directory too long": (sealed(good_members(), size=1 << 20), "its zip directory is damaged"),
    "64 bits elsewhere": (sealed(good_members(), zip64=True, start=(1 << 31)), "its zip directory is damaged"),
    "a second archive": (b"PK\3\4" + sealed(good_members()), "checksum is wrong"),
    "no archive": (
        (junk := b"x" * 400 + b"mglu_ops seal 1 torch=2.13.0 device=cpu adler32=") + b"%08x" % zlib.adler32(junk),
        "it is no zip archive of torch",
    ),
}


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_leaves_its_folder_is_refused(name: bytes, words: Words) -> None:
    said = words(with_member(name=name))
    assert said.startswith("the name of member '")
    assert "' must be a relative path between single slashes, without '.', '..', backslashes, drive letters" in said


def test_nothing_is_written_outside_of_the_folder_of_the_loader(tmp_path: Path) -> None:
    """Torch's loader would write the file: 20 folders up is the root, wherever it extracts to."""
    target = tmp_path / "outside.txt"
    climb = FOLDER + b"../" * 20 + str(target).lstrip("/").encode()
    package = tmp_path / "model.pt2"
    package.write_bytes(with_member(name=climb))
    with pytest.raises(PackageError, match="the name of member"):
        mglu_ops.load(package)
    assert not target.exists()


@pytest.mark.parametrize("case", DAMAGED_ARCHIVES)
def test_an_archive_that_torch_does_not_write_is_refused(case: str, words: Words) -> None:
    data, expected = DAMAGED_ARCHIVES[case]
    assert expected in words(data)


def test_a_small_file_that_inflates_to_a_large_one_is_refused_as_it_is(tmp_path: Path) -> None:
    """100 MB would come of 100 kB, of a package's texts and of a file of weights."""
    zeros = bytes(100_000_000)
    texts = replace(described(b" "), data=zeros, method=8)
    package, weights = tmp_path / "model.pt2", tmp_path / "weights.pt"
    package.write_bytes(sealed([texts, *good_members()[1:]]))
    weights.write_bytes(archive([Member(b"weights/data.pkl", zeros, method=8)]))
    assert package.stat().st_size < 200_000
    del zeros, texts
    tracemalloc.start()
    for load, path in ((mglu_ops.load, package), (mglu_ops.load_weights, weights)):
        with pytest.raises(PackageError, match=r"is compressed \(method 8\), must be stored"):
            load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


def test_texts_are_read_up_to_a_limit(words: Words) -> None:
    huge = described({**INFO.texts(), "more": "x" * (1 << 22)})
    assert "bytes, must have at most 4194304" in words(sealed([huge, *good_members()[1:]]))


def test_archives_of_torch_are_read(tmp_path: Path) -> None:
    """Torch writes records of 64 bits whatever the size, and names in UTF-8."""
    path = tmp_path / "modèle.pt"
    torch.save({"weight": torch.ones(3)}, path)
    with opened(path) as file, zipfile.ZipFile(path) as other:
        members = read_members(file)
        assert [member.name.decode() for member in members] == other.namelist()
        for member in members:
            file.seek(member.start)
            assert file.read(member.size) == other.read(member.name.decode())


def test_members_above_4_gigabytes_are_read(tmp_path: Path) -> None:
    """The file is sparse. Its sizes and offsets are in the extra fields of its entries, as torch writes them."""
    huge, path = 5 << 30, tmp_path / "huge.pt"
    extras = struct.pack("<2H2Q", 1, 16, huge, huge), struct.pack("<2HQ", 1, 8, huge + 500)
    members = [
        Member(b"m/huge", size=0xFFFFFFFF, extra=extras[0]),
        Member(b"m/last", b"last", offset=0xFFFFFFFF, extra=extras[1]),
    ]
    small = archive(members, zip64=True)
    first, end = archive([Member(b"m/huge")]).index(b"PK\1\2"), small.rindex(b"PK\6\6")
    last = small[first : small.index(b"PK\1\2")]
    directory = small[first + len(last) : end]
    start = huge + 500 + len(last)
    record = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 2, 2, len(directory), start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, start + len(directory), 1)
    final = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 2, 2, len(directory), 0xFFFFFFFF, 0)
    with path.open("wb") as file:
        file.write(small[:first])
        file.seek(huge + 500)
        file.write(last + directory + record + locator + final)
    with opened(path) as opened_file:
        members_read = read_members(opened_file)
    assert [(member.name, member.size) for member in members_read] == [(b"m/huge", huge), (b"m/last", 4)]
    with zipfile.ZipFile(path) as other:
        assert [(info.filename, info.file_size) for info in other.infolist()] == [("m/huge", huge), ("m/last", 4)]


@pytest.mark.long
@needs_compiler
def test_the_library_refuses_archives_in_the_same_words(words_of_both: Words) -> None:
    assert words_of_both(sealed(good_members())) == ""
    assert words_of_both(sealed(good_members(), zip64=True)) == ""
    for name in BAD_NAMES:
        assert words_of_both(with_member(name=name)) != ""
    for data, _ in DAMAGED_ARCHIVES.values():
        assert words_of_both(data) != ""


ALIKE = sealed([*good_members(), Member(FOLDER + b"more.txt", b"more", extra=struct.pack("<2H", 9, 0))])
DIRECTORY = ALIKE.index(b"PK\1\2")


@st.composite
def changed_archives(draw: st.DrawFn) -> bytes:
    """Draw a package with a right seal in whose directory and headers some bytes were changed."""
    data = bytearray(ALIKE if draw(st.booleans()) else sealed(good_members(), zip64=True))
    places = [data.index(b"PK\1\2"), len(data) - 90, data.index(b"PK\3\4", 10), 0]
    for _ in range(draw(st.integers(1, 3))):
        at = min(draw(st.sampled_from(places)) + draw(st.integers(0, 80)), len(data) - 9)
        data[at] = draw(st.sampled_from([0, 1, 2, 0x2E, 0x2F, 0x50, 0x7F, 0x80, 0xFF]))
    return bytes(data[:-8]) + b"%08x" % zlib.adler32(bytes(data[:-8]))


@s.examples(300)
@given(data=changed_archives())
def test_what_is_accepted_is_read_alike_by_every_reader(data: bytes, words: Words, tmp_path: Path) -> None:
    if words(data):
        return
    path = tmp_path / "crafted.pt2"
    with opened(path) as file, zipfile.ZipFile(path) as other:
        found = [(member.name, member.header, member.size) for member in read_members(file)]
        entries = [
            (entry.orig_filename.encode("utf-8" if entry.flag_bits & 0x800 else "cp437"), entry)
            for entry in other.infolist()
        ]
        assert found == [(name, entry.header_offset, entry.file_size) for name, entry in entries]


@pytest.mark.long
@needs_compiler
@s.examples(300)
@given(data=changed_archives())
def test_the_library_reads_changed_archives_in_the_same_way(data: bytes, words_of_both: Words) -> None:
    words_of_both(data)


# --- Descriptions ---------------------------------------------------------------------------------------------------

DEEP = "[" * 100_000

BAD_TEXTS: list[tuple[object, str]] = [
    (b"", "member 'model/data/aotinductor/model/code.wrapper_metadata.json' is not valid JSON"),
    (b"\xff", "is not valid JSON"),
    (b"\xef\xbb\xbf{}", "is not valid JSON"),
    (DEEP.encode(), "is not valid JSON, or is nested more than 8 deep"),
    (b'{"a": ' * 100_000, "is not valid JSON, or is nested more than 8 deep"),
    (b'{"a": "1", "a": "2"}', "'a' is there twice"),
    ([1], "got a list, must be an object"),
    ({"AOTI_DEVICE_KEY": 3}, "'AOTI_DEVICE_KEY': got 3, must be text"),
    ({KEY: None}, "'mglu_ops': got null, must be text"),
    ({}, "it lacks its description"),
]

BAD_DESCRIPTIONS: list[tuple[object, str]] = [
    ("", "its description is not valid JSON"),
    ("{", "its description is not valid JSON"),
    ("\ud800", "its description is not valid JSON"),
    (DEEP, "its description is not valid JSON, or is nested more than 8 deep"),
    ([], "its description: got a list, must be an object"),
    ("null", "its description: got null, must be an object"),
    ({}, "its description: format: is missing"),
    (description(format=1), "its description: format: got 1, must be 3; export the model anew"),
    (description(format=True), "format: got true, must be 3"),
    (description(format=2.0), "format: got a number that is no 64-bit integer, must be 3"),
    (description(format=float("nan")), "format: got a number that is no 64-bit integer, must be 3"),
    (description(format=10**30), "format: got a number that is no 64-bit integer, must be 3"),
    (json.dumps(description()).replace('"format": 3', '"format": 3' + "0" * 5000), "format: got a number that is no"),
    (json.dumps(description())[:-1] + ', "device": "cuda"}', "its description: 'device' is there twice"),
    (description(surprise=1), "its description: 'surprise' is unknown to this version of mglu_ops"),
    (description(torch=3), "torch: got 3, must be printable text"),
    (description(torch="2.13\n"), "torch: got '2.13\\x0a', must be printable text"),
    (description(torch="1.0"), f"torch: got '1.0', must be '{INFO.torch}', as in the seal"),
    (description(device="tpu"), "device: got 'tpu', must be one of cpu, cuda"),
    (description(device="cuda"), "arch: got null, must be a list of 2 for the device cuda"),
    (description(device="cuda", arch=[9, 0]), "device: got 'cuda', must be 'cpu', as in the seal"),
    (description(device="\ud800"), "device: got '\\xed\\xa0\\x80', must be one of"),
    (description(backend=None), "backend: got null, must be one of cpu, cuda, triton, composite"),
    (description(calls=["operator"]), "calls: got a list, must be one of operator, shim, nothing"),
    (description(embeds_weights=1), "embeds_weights: got 1, must be true or false"),
    (description(cpu=[3]), "cpu: got a list, must be a list of 2"),
    (description(cpu=["x86_64", 2]), "cpu[1]: got 2, must be printable text"),
    (description(cpu={}), "cpu: got an object, must be a list of 2"),
    (description(arch=[9, -1]), "arch[1]: got -1, must be an integer of at least 0"),
    (description(arch=5), "arch: got 5, must be a list of 2"),
    (description(missed="none"), "missed: got 'none', must be a list"),
    (description(missed=["\u202e", "\x1b[2J"]), "missed[1]: got '\\x1b[2J', must be printable text"),
    (description(inputs=None), "inputs: got null, must be a list"),
    (description(inputs=[3]), "inputs[0]: got 3, must be an object"),
    (description(inputs=[{**INPUT, "shape": 3}]), "inputs[0].shape: got 3, must be a list"),
    (description(inputs=[{**INPUT, "shape": [[1]]}]), "inputs[0].shape[0]: got a list, must be a list of 3"),
    (
        description(inputs=[{**INPUT, "shape": [2, "64"]}]),
        "inputs[0].shape[1]: got '64', must be an integer of at least",
    ),
    (
        description(inputs=[{**INPUT, "shape": [[None, 3, "s0"]]}]),
        "inputs[0].shape[0][0]: got null, must be an integer",
    ),
    (description(inputs=[{**INPUT, "shape": [[1, 3, 5]]}]), "inputs[0].shape[0][2]: got 5, must be printable text"),
    (description(inputs=[{**INPUT, "order": [-1]}]), "inputs[0].order[0]: got -1, must be an integer of at least 0"),
    (description(inputs=[{**INPUT, "is_written": 0}]), "inputs[0].is_written: got 0, must be true or false"),
    (description(inputs=[{**INPUT, "constant": 3}]), "inputs[0].constant: got 3, must be printable text"),
    (description(conditions=[3]), "conditions[0]: got 3, must be printable text"),
    (description(layers=[LAYER, {}]), "layers[1].n_masks: is missing"),
    (description(layers=[{**LAYER, "n_masks": 17}]), "layers[0].n_masks: got 17, must be an integer from 1 to 16"),
    (description(layers=[{**LAYER, "dtype": "int8"}]), "layers[0].dtype: got 'int8', must be one of float16, bfloat16"),
    (description(layers=[{**LAYER, "activation": []}]), "layers[0].activation: got a list, must be one of silu, gelu"),
    (description(layers=[{**LAYER, "more": 1}]), "layers[0]: 'more' is unknown to this version"),
    (
        description(weights=[{**WEIGHT, "strides": [1.5]}]),
        "weights[0].strides[0]: got a number that is no 64-bit integer",
    ),
]


@pytest.mark.parametrize(("texts", "expected"), BAD_TEXTS)
def test_texts_that_torch_does_not_write_are_refused(texts: object, expected: str, words: Words) -> None:
    assert expected in words(sealed([described(texts), *good_members()[1:]]))


@pytest.mark.parametrize(("crafted", "expected"), BAD_DESCRIPTIONS)
def test_a_wrong_description_is_refused_by_the_name_of_its_field(crafted: object, expected: str, words: Words) -> None:
    assert expected in words(package_with(crafted))


def test_a_text_that_never_ends_is_refused_at_once(words: Words) -> None:
    """Each character is read once: a string of escaped quotes has a million places where another could start."""
    start = time.monotonic()
    assert "is not valid JSON" in words(sealed([described(b'"' + b'\\"' * 1_000_000), *good_members()[1:]]))
    assert time.monotonic() - start < 10


def test_a_right_description_is_read(tmp_path: Path, words: Words) -> None:
    assert words(package_with(description())) == ""
    info = read_info(tmp_path / "crafted.pt2")
    assert info.layers[0].activation == "silu"
    assert str(info).splitlines()[0].endswith("crafted.pt2: 1 MGLU layer, backend cpu, cpu")


def test_two_different_descriptions_are_refused(words: Words) -> None:
    """Torch writes its texts twice, and reads one of the two files."""
    first = described(INFO.texts())
    second = replace(first, name=FOLDER + b"code.kernel_metadata.json")
    code = good_members()[1:]
    assert words(sealed([first, second, *code])) == ""
    other = described({KEY: json.dumps(description())})
    assert words(sealed([first, replace(other, name=second.name), *code])) == "it holds two different descriptions"


@pytest.mark.long
@needs_compiler
def test_the_library_refuses_descriptions_in_the_same_words(words_of_both: Words) -> None:
    for texts, expected in BAD_TEXTS:
        assert expected in words_of_both(sealed([described(texts), *good_members()[1:]]))
    for crafted, expected in BAD_DESCRIPTIONS:
        assert expected in words_of_both(package_with(crafted))
    assert words_of_both(package_with(description())) == ""


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 2, 16, 17, -1, 2**31, 2**63, -(2**63), 10**40])
    | st.floats()
    | st.text(st.characters(), max_size=6)
    | st.sampled_from(["cpu", "cuda", "silu", "float32", "\ud800", "\x1b[2J", "2.13.0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def entry_of(draw: st.DrawFn, value: Any) -> tuple[Any, Any]:
    """Draw a list or an object inside a value, and a key of it."""
    key = draw(st.sampled_from(list(value) if isinstance(value, dict) else list(range(len(value)))))
    inner = value[key]
    return entry_of(draw, inner) if isinstance(inner, (dict, list)) and inner and draw(st.booleans()) else (value, key)


@st.composite
def descriptions(draw: st.DrawFn) -> str:
    """Draw the JSON of a description in which a value was replaced or removed, or a character of the text."""
    value = copy.deepcopy(description())
    place, key = entry_of(draw, value)
    if draw(st.integers(0, 5)):
        place[key] = draw(JSON)
    else:
        del place[key]
    text = json.dumps(value, ensure_ascii=draw(st.booleans()))
    if draw(st.integers(0, 3)):
        return text
    at = draw(st.integers(0, len(text)))
    inserted = draw(st.sampled_from(["", "{", "]", '"', "\\u12", ",", "NaN", "-", "0", "1e9", "\0"]))
    return text[:at] + inserted + text[at + 1 :]


@s.examples(400)
@given(crafted=descriptions())
def test_any_description_is_read_or_refused(crafted: str, words: Words, tmp_path: Path) -> None:
    said = words(package_with(crafted))
    if said:
        assert said.startswith("its description")
        return
    str(read_info(tmp_path / "crafted.pt2")).encode()
    with pytest.raises(PackageError):  # it has no code
        mglu_ops.load(tmp_path / "crafted.pt2")


@pytest.mark.long
@needs_compiler
@s.examples(400)
@given(crafted=descriptions())
def test_the_library_says_the_same_of_any_description(crafted: str, words_of_both: Words) -> None:
    words_of_both(package_with(crafted))


# --- Machine code, weights and files --------------------------------------------------------------------------------


ELF_CHANGES = st.lists(st.tuples(st.integers(0, 191), st.sampled_from([0, 1, 11, 0x40, 0xFF])), max_size=6)


@s.examples(100)
@given(changes=ELF_CHANGES)
def test_damaged_machine_code_is_refused(changes: list[tuple[int, int]], tmp_path: Path) -> None:
    """An ELF header and two sections, of which any field may be wrong."""
    section = struct.pack("<IIQQQQIIQQ", 0, 11, 0, 0, 0, 24, 0, 0, 0, 0)
    code = bytearray(b"\x7fELF\x02\x01".ljust(64, b"\0") + section * 2)
    struct.pack_into("<Q", code, 40, 64)
    struct.pack_into("<H", code, 60, 2)
    for at, value in changes:
        code[at] = value
    members = good_members()
    package = tmp_path / "model.pt2"
    package.write_bytes(sealed([members[0], replace(members[1], data=bytes(code))]))
    with pytest.raises(PackageError, match=r"machine code|torch cannot load it"):
        mglu_ops.load(package)


def test_weights_that_are_no_tensors_by_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({1: torch.ones(2)}, path)
    with pytest.raises(PackageError, match="something else than tensors by name"):
        mglu_ops.load_weights(path)


@pytest.mark.long
@needs_compiler
def test_the_library_checks_weights(library: Path, tmp_path: Path) -> None:
    check = ctypes.CDLL(str(library)).mglu_check_weights
    check.restype = ctypes.c_char_p
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.arange(100.0)}, path)
    whole = path.read_bytes()
    assert check(os.fsencode(path)) is None
    middle = whole.index(torch.arange(50.0, 60.0).numpy().tobytes())
    bomb = archive([Member(b"weights/data.pkl", bytes(1000), method=8)])
    for data in (whole[:-100], whole[:middle] + b"\x55" + whole[middle + 1 :], b"", bomb):
        path.write_bytes(data)
        said = check(os.fsencode(path)).decode()
        if data:
            assert said == f"{path}: {in_python(mglu_ops.load_weights, path)}"
    assert check(None).startswith(b"path (null): ")
    assert check(b"/dev/zero").endswith(b"no file, or cannot be read")
