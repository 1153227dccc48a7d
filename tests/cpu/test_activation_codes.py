"""The compiled kernels have the activations of `mglu_ops.activations`, with the same names and codes."""

from __future__ import annotations

import re

from mglu_ops.activations import ACTIVATIONS
from mglu_ops.backends.cpu import build
from mglu_ops.backends.cuda import compiler

CODES = {name: activation.code for name, activation in ACTIVATIONS.items()}


def test_codes_count_from_zero_without_gaps() -> None:
    """The C++ library indexes a table of names by the code."""
    assert list(CODES.values()) == list(range(len(CODES)))


def test_cuda_kernels_have_the_same_codes() -> None:
    source = (compiler.source_directory() / "activation.cuh").read_text()
    enumeration = re.search(r"enum class Activation : int \{(.*?)\};", source, re.DOTALL)
    assert enumeration is not None
    found = re.findall(r"(\w+) = (\d+),", enumeration[1])
    assert [(name, int(code)) for name, code in found] == list(CODES.items())


def test_cpu_kernels_have_the_same_codes() -> None:
    source = (build.source_directory() / "activation.h").read_text()
    found = re.findall(r"^MGLU_ACTIVATION\((\w+), (\d+),", source, re.MULTILINE)
    assert [(name, int(code)) for name, code in found] == list(CODES.items())
