"""Implementations of the operators of `mglu_ops.ops`, over plain tensors and without autograd.

A backend is an object that says which calls it supports, and prepares them (`base`). To add one, write its module and
enter it below.
"""

from __future__ import annotations

from collections.abc import Mapping

from .base import Backend
from .composite import Composite
from .cpu import Cpu
from .cuda import Cuda
from .triton import Triton

__all__ = ["BACKENDS", "Backend"]

BACKENDS: Mapping[str, Backend] = {backend.name: backend for backend in (Cuda(), Triton(), Cpu(), Composite())}
"""All backends by name, the fastest first. The first one that can run a task of a call is used."""
