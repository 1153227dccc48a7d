"""The C++ and CUDA sources list the activations of `mglu_ops.activations` with the same names and codes."""

from __future__ import annotations

import re

from mglu_ops.activations import ACTIVATIONS
from mglu_ops.backends.cpu import build
from mglu_ops.backends.cuda import compiler


def test_kernels_have_the_same_codes_which_count_from_zero_without_gaps() -> None:
    """Codes must have no gaps, because the C++ library uses them as indices into a table of names."""
    source = (compiler.source_directory() / "activation.cuh").read_text()
    (enumeration,) = re.findall(r"enum class Activation : int \{(.*?)\};", source, re.DOTALL)
    on_gpu = re.findall(r"(\w+) = (\d+),", enumeration)
    source = (build.source_directory() / "activation.h").read_text()
    on_cpu = re.findall(r"^MGLU_ACTIVATION\((\w+), (\d+),", source, re.MULTILINE)
    assert on_gpu == on_cpu == [(name, str(number)) for number, name in enumerate(ACTIVATIONS)]
    assert [activation.code for activation in ACTIVATIONS.values()] == list(range(len(ACTIVATIONS)))
