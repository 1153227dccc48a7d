"""Masked Gated Linear Units (arXiv 2506.23225) for PyTorch: operators, modules and a fusion pass."""

from . import ops  # registers torch.ops.mglu.*
