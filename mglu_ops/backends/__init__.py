"""Implementations of `mglu::forward`, over plain tensors and without autograd.

A backend is an object that says which calls it supports, and prepares them (`base`). To add one, write its module and
enter it below. `reference` is the float64 oracle of the tests, not a backend.
"""

from __future__ import annotations

from collections.abc import Mapping

from .base import Backend, PreparedCall
from .composite_experts import CompositeExperts
from .cpu import Cpu
from .cuda import Cuda
from .triton import Triton

__all__ = ["BACKENDS", "Backend", "PreparedCall"]

BACKENDS: Mapping[str, Backend] = {backend.name: backend for backend in (Cuda(), Triton(), Cpu(), CompositeExperts())}
"""All backends by name. Each pass of training uses the first backend that can run it."""
