"""Calls of the CPU backend with an instruction set, what they should give, and a library of emulated instructions."""

from __future__ import annotations

import hashlib
import math
import shlex
from pathlib import Path

import pytest
from backend_calls import run_on
from strategies import Layer
from torch import Tensor

from mglu_ops.backends import reference
from mglu_ops.backends.cpu import build, library

EMULATION = Path(__file__).parents[1] / "cpu" / "cpu_avx512_emulation.h"


def emulated_library() -> library.Library:
    """The kernels built with emulated intrinsics, which has all instruction sets on every x86-64 machine."""
    version = hashlib.sha256(EMULATION.read_bytes()).hexdigest()[:16]  # the options are part of the cache's key
    options = (f'-DMGLU_EMULATE_AVX512="{EMULATION.name}"', f"-DMGLU_EMULATION={version}", f"-I{EMULATION.parent}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", tuple("-O1" if flag == "-O2" else flag for flag in build.FLAGS))
        patch.setenv("CXX", shlex.join((*build.find_compiler(), *options)))
        return build.load_library(library.Library)


def run(layer: Layer, isa: str = "best") -> Tensor:
    x = layer.x.reshape(math.prod(layer.x.shape[:-1]), layer.x.shape[-1])
    route = layer.route_weights
    route = None if route is None else route.reshape(len(x), route.shape[-1])
    result = run_on("cpu", x, layer.weight, layer.packed_masks, layer.activation, route, launch=isa)
    return result.view(*layer.x.shape[:-1], layer.weight.shape[0])


def oracle(layer: Layer) -> Tensor:
    return reference.forward(layer.x, layer.weight, layer.masks, layer.activation, layer.route_weights)
