"""The seal at the end of a package or a weights file, with which Python and C++ detect damage.

torch's loaders compare no checksums. Packages and weights files are zip archives, and `export` writes the seal as the
archive's comment, at the end of the file:

    mglu_ops seal 8 package torch=2.13 device=cpu weights=inside adler32=5e8fa1c0
    mglu_ops seal 8 weights adler32=5e8fa1c0

The number is the version of the file's format. The last eight characters are the Adler-32 checksum (RFC 1950) of all
bytes before them. `csrc/library/seal.cpp` makes the same checks. A seal detects damage and mistakes. It cannot detect
malice, because whoever writes a file can seal it.
"""

from __future__ import annotations

import mmap
import os
import re
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

FORMAT = 8
"""The version of packages and weights files, which changes whenever one of them is written differently."""

_SEAL = re.compile(rb"mglu_ops seal (\d{1,9}) ([!-~ ]*)adler32=([0-9a-f]{8})\Z")
_CHECKSUM_DIGITS = 8
_TAIL_BYTES = 1 << 16


class PackageError(RuntimeError):
    """A file is not a package, is damaged, or does not fit this process. The message says which, and what to do."""


def seal(path: Path, contents: str) -> None:
    """Write the seal of a zip archive. `contents` are the words between the version and the checksum."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = f"mglu_ops seal {FORMAT} {contents} adler32=".encode() + b"0" * _CHECKSUM_DIGITS
    with path.open("r+b") as file:
        checksum = _checksum(file)
        file.seek(-_CHECKSUM_DIGITS, os.SEEK_END)
        file.write(checksum)


def check_seal(path: Path, kind: str) -> None:
    """Check that a file is undamaged, and of the given kind, "package" or "weights".

    Raises:
        FileNotFoundError: there is no such file.
        PackageError: the file has no seal or another version, is damaged, or is of the other kind.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        tail = file.read()
        found = _SEAL.search(tail)
        if found is None:
            if re.search(rb"/models/[^/]+\.json", tail):
                raise PackageError(
                    f"{path} is a program of torch.export.save and no package: torch.export.load reads it, and "
                    "mglu_ops.export makes a package of the program"
                )
            raise PackageError(f"{path} has no seal at its end: it is truncated, or was not made by mglu_ops.export")
        if int(found[1]) != FORMAT:
            raise PackageError(f"{path} has the format {int(found[1])}, must have {FORMAT}: export the model anew")
        if found[3] != _checksum(file):
            raise PackageError(f"{path} is damaged: its checksum is wrong")
        if (sealed := found[2].decode().split()[0]) != kind:
            raise PackageError(f"{path} is sealed as {sealed!r}, must be {kind!r}")


def _checksum(file: BinaryIO) -> bytes:
    """The checksum of all but the last eight bytes of a file. The file is mapped, since it may not fit into memory."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
        return b"%08x" % zlib.adler32(view[:-_CHECKSUM_DIGITS])
