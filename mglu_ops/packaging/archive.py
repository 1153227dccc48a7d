"""The zip archives of torch, read strictly, so that every other reader of such a file finds the same members.

`PyTorchFileWriter` writes packages and the files of `torch.save`. It stores members one after another, without
compression (torch 2.11 to 2.15). Whoever extracts an archive follows its names and sizes: a name with `..` is a file
outside of the folder, and a small compressed member may be a large file. So anything that this writer does not write
is refused before a member is read. As members are stored and do not overlap, the bytes that are extracted are never
more than the bytes of the file.

`csrc/library/zip_archive.cpp` is the same in C++, with the same words.
"""

from __future__ import annotations

import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

LONGEST_COMMENT = 256
"""The most bytes after an archive's last record; the seal of a package is there."""

_MOST_DIRECTORY_BYTES = 1 << 26
_LARGEST_32 = 0xFFFFFFFF  # stands for a value in an extra field

# The structures of APPNOTE.TXT (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT), sections 4.3.7 to 4.3.16.
_LOCAL = struct.Struct("<4s5H3I2H")  # signature, version, flags, method, time, date, crc32, stored, size, name, extra
_ENTRY = struct.Struct("<4s6H3I5H2I")  # signature, 2 versions, flags, method, ..., attributes, offset
_END = struct.Struct("<4s4H2IH")  # signature, disk, its first, members here, members, size, offset, comment
_END_64 = struct.Struct("<4sQ2H2I4Q")  # signature, its size, 2 versions, and the values of _END
_LOCATOR_64 = struct.Struct("<4sIQI")  # signature, disk, offset of the record, disks

_DESCRIPTOR_FOLLOWS, _UTF8 = 0x0008, 0x0800
_FLAGS = _DESCRIPTOR_FOLLOWS | _UTF8  # any other says that the data is encrypted or a patch

_BAD_NAME = re.compile(rb"(?:\A|/)\.{0,2}(?:/|\Z)|[\x00-\x1f\x7f\\]|\A[A-Za-z]:")
"""An empty part, `.` or `..`, a control character, a backslash, or a drive letter."""


class PackageError(RuntimeError):
    """A file is no package, is damaged, or does not fit this process; the message says which, and what to do."""


@dataclass(frozen=True)
class Member:
    """A member of an archive: its header is at `header` in the file, its bytes are the `size` bytes from `start`."""

    name: bytes
    header: int
    start: int
    size: int
    crc32: int


@contextmanager
def opened(path: str | Path, mode: str = "rb") -> Iterator[BinaryIO]:
    """A file, whose path is put before the message of each `PackageError`.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not a file")
    try:
        with Path(path).open(mode) as file:
            yield cast(BinaryIO, file)
    except PackageError as error:
        raise PackageError(f"{path}: {error}") from None


def read_at(file: BinaryIO, start: int, size: int) -> bytes:
    """Some bytes of a file, or fewer if it ends before."""
    file.seek(start)
    return file.read(size)


def quoted(text: str | bytes) -> str:
    """Text of a damaged or hostile file as printable ASCII between quotes, at most 100 bytes of it."""
    raw = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    printable = "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in raw[:100])
    return f"'{printable}'{'...' if len(raw) > 100 else ''}"


def check_name(name: bytes) -> None:
    """Check that the name of a member names a file below the folder that an archive is extracted to."""
    if _BAD_NAME.search(name):
        raise PackageError(
            f"the name of member {quoted(name)} must be a relative path between single slashes, without '.', '..', "
            "backslashes, drive letters and control characters"
        )


def read_members(file: BinaryIO) -> list[Member]:
    """The members of an archive in the order in which they are stored.

    Raises:
        PackageError: the file is no archive, is damaged, or holds what torch's writer does not write.
    """
    count, start, end, _ = _directory(file)
    if end - start > _MOST_DIRECTORY_BYTES:
        raise PackageError(f"its zip directory has {end - start} bytes, must have at most {_MOST_DIRECTORY_BYTES}")
    directory, position = read_at(file, start, end - start), 0
    members: list[Member] = []
    names: set[bytes] = set()
    stored_to = 0
    for _ in range(count):
        member, position = _entry(file, directory, position, limit=start)
        # torch's loader looks a name up without regard to the case of ASCII letters.
        if member.name.lower() in names:
            raise PackageError(f"member {quoted(member.name)} is there twice, or differs from another only in case")
        if member.header < stored_to:
            raise _outside(member.name)
        names.add(member.name.lower())
        members.append(member)
        stored_to = member.start + member.size
    if position != len(directory):
        raise _damaged()
    return members


def comment_position(file: BinaryIO) -> int:
    """The offset of the two bytes that hold the size of an archive's comment, which follows them."""
    return _directory(file).last_byte - 2


def _damaged() -> PackageError:
    return PackageError("its zip directory is damaged")


def _outside(name: bytes) -> PackageError:
    return PackageError(f"member {quoted(name)} overlaps another one, or lies outside of the file")


class _Directory(NamedTuple):
    """The offset of the directory of an archive, and the end of its last record."""

    members: int
    start: int
    end: int
    last_byte: int


def _directory(file: BinaryIO) -> _Directory:
    size = file.seek(0, 2)
    tail_start = max(0, size - _END.size - LONGEST_COMMENT)
    tail = read_at(file, tail_start, size - tail_start)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < _END.size:
        raise PackageError("it is no zip archive of torch, or it is truncated")
    _, disk, first_disk, here, count, directory_size, start, comment = _END.unpack_from(tail, at)
    last_record = tail_start + at
    end = last_record + _END.size
    if end + comment != size:
        raise _damaged()
    size_64 = _END_64.size + _LOCATOR_64.size
    records_64 = read_at(file, last_record - size_64, size_64) if last_record >= size_64 else b""
    if records_64[_END_64.size :].startswith(b"PK\6\7"):
        last_record -= size_64
        _, disk_64, offset, disks = _LOCATOR_64.unpack_from(records_64, _END_64.size)
        record = _END_64.unpack_from(records_64)
        signature, record_size, _, _, disk, first_disk, here, count, directory_size, start = record
        expected = (b"PK\6\6", _END_64.size - 12, 0, last_record, 1)
        if (signature, record_size, disk_64, offset, disks) != expected:
            raise _damaged()
    if disk != 0 or first_disk != 0 or here != count or start + directory_size != last_record:
        raise _damaged()
    return _Directory(count, start, last_record, end)


def _entry(file: BinaryIO, directory: bytes, position: int, limit: int) -> tuple[Member, int]:
    """The member of the entry at a position of the directory, and the position of the next entry.

    A member and its header must end before `limit`, the start of the directory.
    """
    if len(directory) - position < _ENTRY.size:
        raise _damaged()
    fields = _ENTRY.unpack_from(directory, position)
    signature, _, _, flags, method, _, _, crc32, stored, size, name_size, extra_size, comment_size = fields[:13]
    disk, _, attributes, offset = fields[13:]
    first = position + _ENTRY.size
    after = first + name_size + extra_size + comment_size
    if signature != b"PK\1\2" or after > len(directory):
        raise _damaged()
    name = directory[first : first + name_size]
    check_name(name)
    extra = directory[first + name_size : first + name_size + extra_size]
    size, stored, offset = _zip64_values(extra, (size, stored, offset))
    if method != 0 or size != stored:
        raise PackageError(f"member {quoted(name)} is compressed (method {method}), must be stored as it is")
    if flags & ~_FLAGS:
        raise PackageError(f"member {quoted(name)} has the flags {flags:#06x}: it is encrypted, or no file of torch's")
    if stat.S_IFMT(attributes >> 16) not in (0, stat.S_IFREG):
        raise PackageError(f"member {quoted(name)} is a link or a special file, must be a regular file")
    if disk != 0:
        raise _damaged()
    if offset + _LOCAL.size + name_size > limit:
        raise _outside(name)
    start = _start(file, offset, name)
    if start + size > limit:
        raise _outside(name)
    return Member(name, offset, start, size, crc32), after


def _zip64_values(extra: bytes, values: tuple[int, int, int]) -> list[int]:
    """Size, stored size and offset of an entry. Those that need more than 32 bits are in an extra field."""
    large: list[int] = []
    while extra:
        if len(extra) < 4 or len(extra) < 4 + struct.unpack_from("<2H", extra)[1]:
            raise _damaged()
        kind, size = struct.unpack_from("<2H", extra)
        if kind == 1:
            if large or size % 8 != 0:
                raise _damaged()
            large = list(struct.unpack_from(f"<{size // 8}Q", extra, 4))
        extra = extra[4 + size :]
    if len(large) < values.count(_LARGEST_32):
        raise _damaged()
    return [large.pop(0) if value == _LARGEST_32 else value for value in values]


def _start(file: BinaryIO, offset: int, name: bytes) -> int:
    """The offset of the bytes of a member, which follow a header of its own that must agree with its entry."""
    local = read_at(file, offset, _LOCAL.size + len(name))
    signature, _, flags, method, _, _, _, _, _, name_size, extra_size = _LOCAL.unpack_from(local)
    is_same = (name_size, local[_LOCAL.size :]) == (len(name), name)
    if signature != b"PK\3\4" or method != 0 or flags & ~_FLAGS or not is_same:
        raise PackageError(f"member {quoted(name)} has another name, method or flags in the header before its bytes")
    return offset + _LOCAL.size + len(name) + int(extra_size)
