"""Finds packages that contain a copy of libstdc++, because such a package crashes a Python process.

A C++ compiler that links libstdc++ statically (`-static-libstdc++`, or an installation without `libstdc++.so`) puts a
copy into the machine code of a package, which then exports the copy's symbols. A Python process loads torch, and with
it `libstdc++.so`, in a way that hides their functions from libraries that are loaded later. So the package calls the
functions of its copy. But the identifiers of locale facets are unique symbols (`STB_GNU_UNIQUE`): a process has only
one of each, here the one in `libstdc++.so`. The copy therefore looks up its facets by identifiers that another
library has numbered, and finds a wrong facet or none. The first `std::regex` in the package looks up a facet while the
package is loaded. Code of GCC 12 then throws `std::bad_cast`. Code of GCC 13 does not check the facet, and the process
ends with a segmentation fault.

A C++ program that is linked to libtorch does not hide `libstdc++.so`, so its packages call the functions of that
library.
"""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import IO

_ELF_64_BIT_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr: name, type, flags, address, offset, size, link, ...
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym: name, info, other, section, value, size
_DYNAMIC_SYMBOLS = 11  # SHT_DYNSYM
_UNDEFINED = 0  # SHN_UNDEF

_FUNCTION_OF_LIBSTDCXX = b"_ZNSt6locale7classicEv\0"
"""`std::locale::classic()`, which no header defines and which every use of streams or regular expressions needs."""


def has_own_libstdcxx(package: Path) -> bool:
    """True if machine code in a package exports a copy of libstdc++."""
    with zipfile.ZipFile(package) as archive:
        for name in archive.namelist():
            if name.endswith(".so"):
                with archive.open(name) as library:
                    if _exports_libstdcxx(library):
                        return True
    return False


def _exports_libstdcxx(library: IO[bytes]) -> bool:
    """True if a shared library exports a function of libstdc++.

    The result is False for files in other formats than ELF. On systems with such files, the symbols of one library do
    not replace the symbols of another.
    """

    def read(offset: int, size: int) -> bytes:
        library.seek(offset)
        return library.read(size)

    header = read(0, 64)
    if not header.startswith(_ELF_64_BIT_LITTLE_ENDIAN):
        return False
    (table,) = struct.unpack_from("<Q", header, 40)
    (n_sections,) = struct.unpack_from("<H", header, 60)
    sections = list(_SECTION.iter_unpack(read(table, n_sections * _SECTION.size)))
    for _, kind, _, _, offset, size, strings, *_ in sections:
        if kind == _DYNAMIC_SYMBOLS:
            names = read(sections[strings][4], sections[strings][5])
            for name, _, _, section, _, _ in _SYMBOL.iter_unpack(read(offset, size)):
                if section != _UNDEFINED and names.startswith(_FUNCTION_OF_LIBSTDCXX, name):
                    return True
    return False
