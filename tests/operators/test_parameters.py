"""What Python and C++ share: structs of parameters, names and codes of activations, and expressions of sizes."""

from __future__ import annotations

import operator
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mglu_ops.activations import ACTIVATIONS
from mglu_ops.backends.parameters import MAP_BYTES, Parameters, read_parameters
from mglu_ops.files import source_directory
from mglu_ops.sizes import Size, ceil_div, greatest, least, round_up, text

_STRUCT = re.compile(
    r"^struct (\w*Params|Forward|Pack|Unpack|FlipSigns|Scale|\w+Gradients)\b[^;]*?{$.*?^};", re.M | re.S
)
CUDA, CPU = source_directory("cuda"), source_directory("cpu")
SOURCES = [*sorted(CUDA.glob("*.cu*")), CPU / "mglu_cpu.h", CPU / "backward.h"]
STRUCTS = [(source, found[0], found[1]) for source in SOURCES for found in _STRUCT.finditer(source.read_text())]


def offsets(fields: Parameters) -> dict[str, int]:
    """The offset at which the host writes each field."""
    packed = bytearray(fields.size)
    fields.pointer_struct.pack_into(
        packed, 0, *fields.in_order({name: 1 + i for i, name in enumerate(fields.pointers)})
    )
    found = {name: packed.index(1 + i) for i, name in enumerate(fields.pointers)}
    integers = fields.longs + fields.ints
    for name in integers:
        found[name] = fields.with_integers({other: -int(other == name) for other in integers}).index(0xFF)
    return found | {name: fields.map_offset + MAP_BYTES * i for i, name in enumerate(fields.maps)}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_every_struct_is_packed_as_a_compiler_lays_it_out(tmp_path: Path) -> None:
    assert len(STRUCTS) == 23
    lines = ["#include <cstddef>", "#include <cstdio>", '#include "types.cuh"', '#include "mglu_cpu.h"']
    printed, expected = [], []
    for source in SOURCES:
        texts = [text for path, text, _ in STRUCTS if path == source]
        space = re.sub(r"\W", "_", source.name)
        lines.append(f"namespace {space} {{ using namespace mglu; using namespace mglu::cpu;")
        lines += [re.sub(r"^constexpr .*$", "", text, flags=re.MULTILINE) for text in texts]
        lines.append("}")
        for name in (name for path, _, name in STRUCTS if path == source):
            fields = read_parameters(source, name)
            printed.append(f"sizeof({space}::{name})")
            expected.append(fields.size)
            for field, offset in offsets(fields).items():
                printed.append(f"offsetof({space}::{name}, {field})")
                expected.append(offset)
    lines += ["int main() {", *(f'std::printf("%zu\\n", {expression});' for expression in printed), "}"]
    (tmp_path / "layout.cpp").write_text("\n".join(lines))
    options = ["-std=c++17", "-Wno-invalid-offsetof", f"-I{CUDA}", f"-I{CPU}"]
    subprocess.run(["g++", *options, tmp_path / "layout.cpp", "-o", tmp_path / "layout"], check=True)
    output = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout
    assert dict(zip(printed, map(int, output.split()), strict=True)) == dict(zip(printed, expected, strict=True))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "kernel.cu declares no struct Params"),
        ("struct Params {\n    int size;\n    const void* x;\n};\n", r"'const void\* x;' .* comes too late"),
        ("struct Params {\n    int rows, columns;\n};\n", "'int rows, columns;' is no field"),
    ],
)
def test_a_struct_that_cannot_be_packed_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "kernel.cu").write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_parameters(tmp_path / "kernel.cu", "Params")


def test_strides_and_sizes_are_given_by_name() -> None:
    fields = read_parameters(CUDA / "flip_signs.cu", "Params")
    with pytest.raises(TypeError, match="got rows, column, must be weight_row_stride, rows, expert_rows, columns"):
        fields.with_integers({"rows": 1, "column": 2})


def test_kernels_have_the_same_codes_which_count_from_zero_without_gaps() -> None:
    """Codes must have no gaps, because the C++ library uses them as indices into a table of names."""
    source = (CUDA / "activation.cuh").read_text()
    (enumeration,) = re.findall(r"enum class Activation : int \{(.*?)\};", source, re.DOTALL)
    on_gpu = re.findall(r"(\w+) = (\d+),", enumeration)
    source = (CPU / "activation.h").read_text()
    on_cpu = re.findall(r"^MGLU_ACTIVATION\((\w+), (\d+),", source, re.MULTILINE)
    assert on_gpu == on_cpu == [(name, str(number)) for number, name in enumerate(ACTIVATIONS)]
    assert [activation.code for activation in ACTIVATIONS.values()] == list(range(len(ACTIVATIONS)))


STEPS = {
    "+": lambda size, number, b: size + number,
    "r+": lambda size, number, b: number + size,
    "-": lambda size, number, b: size - number,
    "r-": lambda size, number, b: number - size,
    "*": lambda size, number, b: size * number,
    "r*": lambda size, number, b: number * size,
    "sum": lambda size, number, b: b + size,
    "product": lambda size, number, b: size * b,
    "ceil_div": lambda size, number, b: ceil_div(size, number + 1),
    "round_up": lambda size, number, b: round_up(size, number + 1),
    "least": lambda size, number, b: least(size, b),
    "greatest": lambda size, number, b: greatest(number, size),
}
"""Steps of a computation: functions of the size so far, a constant, and another size."""


@given(
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
    st.lists(st.tuples(st.sampled_from([*STEPS]), st.integers(0, 9)), max_size=6),
)
def test_sizes_hold_the_expression_that_gives_their_value(
    values: tuple[int, int], steps: list[tuple[str, int]]
) -> None:
    """For other values of a and b, the expression has the value that plain integers give."""

    def computed(size: int, b: int) -> int:
        for kind, number in steps:
            size = STEPS[kind](size, number, b)
        return size

    size = computed(Size(values[0], "a"), Size(values[1], "b"))
    assert size == computed(*values)
    functions = {"floor_div": operator.floordiv, "least": min, "greatest": max}
    for a, b in (values, (7, 3), (0, 11)):
        assert eval(text(size), functions, {"a": a, "b": b}) == computed(a, b)
