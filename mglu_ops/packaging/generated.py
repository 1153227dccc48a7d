"""Writes the files of `csrc/library` that are made from lists in Python, so that no list is maintained twice.

`python -m mglu_ops.packaging.generated` writes the files; a test compares them with what this module would write.
"""

from __future__ import annotations

from collections.abc import Callable

from ..files import source_directory
from ..formats import FORMATS, WeightFormat
from ..ops import SCHEMAS
from .device_code import plans_of_any_layer


def contract() -> str:
    """Return the schemas of the operators and the formats of weights, as C++ arrays."""
    schemas = "".join(f"    {_quoted(schema)},\n" for schema in SCHEMAS)
    formats = "".join(f"    {_format(one)},\n" for one in FORMATS.values())
    return f"constexpr std::string_view kSchemas[] = {{\n{schemas}}};\nconstexpr Format kFormats[] = {{\n{formats}}};\n"


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


def _format(one: WeightFormat) -> str:
    fields = {"name": _quoted(one.name), "code": f"WeightFormat::{one.name}"}
    if one.dtype is not None:
        fields["dtype"] = f"Scalar::{str(one.dtype).removeprefix('torch.')}"
        fields["scale_dtype"] = f"Scalar::{str(one.scale_dtype).removeprefix('torch.')}"
        fields |= {"rows": str(one.rows), "columns": str(one.columns or 0), "packed": str(one.packed)}
    return f"{{{', '.join(f'.{name} = {value}' for name, value in fields.items())}}}"


FILES: dict[str, Callable[[], str]] = {
    "library/contract.inc": contract,
    "library/cuda/any_layer.inc": plans_of_any_layer,
}
"""The functions that make the contents of the files, by the paths of the files in `csrc`."""


def text_of(path: str) -> str:
    """Return the whole text of a file of `FILES`."""
    return f"// Written by `python -m mglu_ops.packaging.generated`.\n{FILES[path]()}"


if __name__ == "__main__":
    for path in FILES:
        (source_directory() / path).write_text(text_of(path))
