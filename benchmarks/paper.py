"""The latencies that the paper prints (arXiv 2506.23225, appendix on the kernel): a layer, one token, float16, in ms.

The paper's tables call the larger size h and the smaller size d; its text has them the other way round. Here, as in the
text, a shape is `(out_features, in_features)`, and out_features is the larger size.
"""

from __future__ import annotations

from typing import NamedTuple

Shape = tuple[int, int]


class MgluTimes(NamedTuple):
    """A row of a table 'MGLU latency and speed-ups': FlashMGLU, its Triton prototype and the naive layer."""

    cuda: float
    triton: float
    torch: float


class GluTimes(NamedTuple):
    """A row of a table 'CUDA MGLU latency and speed-ups against the standard PyTorch GLU baseline'."""

    cuda: float
    glu: float


MGLU_RTX_5090: dict[tuple[Shape, int], MgluTimes] = {
    ((8192, 2048), 1): MgluTimes(0.0202, 0.0516, 0.0715),
    ((8192, 2048), 2): MgluTimes(0.0210, 0.0533, 0.1358),
    ((8192, 2048), 4): MgluTimes(0.0217, 0.0606, 0.2715),
    ((8192, 2048), 8): MgluTimes(0.0265, 0.0834, 0.5210),
    ((14336, 4096), 1): MgluTimes(0.1166, 0.1342, 0.3289),
    ((14336, 4096), 2): MgluTimes(0.1169, 0.1381, 0.6001),
    ((14336, 4096), 4): MgluTimes(0.1186, 0.1454, 1.1426),
    ((14336, 4096), 8): MgluTimes(0.1229, 0.1990, 2.2172),
}
"""Table tab:mglu_cuda_triton_torch_5090."""

MGLU_H100: dict[tuple[Shape, int], MgluTimes] = {
    ((8192, 2048), 1): MgluTimes(0.0395, 0.0639, 0.1296),
    ((8192, 2048), 2): MgluTimes(0.0409, 0.0679, 0.2213),
    ((8192, 2048), 4): MgluTimes(0.0428, 0.0810, 0.4117),
    ((8192, 2048), 8): MgluTimes(0.0483, 0.1294, 0.7910),
    ((14336, 4096), 1): MgluTimes(0.1044, 0.1191, 0.3896),
    ((14336, 4096), 2): MgluTimes(0.1067, 0.1239, 0.7080),
    ((14336, 4096), 4): MgluTimes(0.1110, 0.1608, 1.3454),
    ((14336, 4096), 8): MgluTimes(0.1215, 0.3202, 2.6354),
}
"""Table tab:mglu_cuda_triton_torch_h100."""

GLU_RTX_5090: dict[tuple[Shape, int], GluTimes] = {
    ((8192, 2048), 1): GluTimes(0.0202, 0.0306),
    ((8192, 2048), 2): GluTimes(0.0210, 0.0306),
    ((8192, 2048), 4): GluTimes(0.0217, 0.0306),
    ((8192, 2048), 8): GluTimes(0.0265, 0.0306),
    ((14336, 4096), 1): GluTimes(0.1166, 0.1530),
    ((14336, 4096), 2): GluTimes(0.1169, 0.1530),
    ((14336, 4096), 4): GluTimes(0.1186, 0.1530),
    ((14336, 4096), 8): GluTimes(0.1229, 0.1530),
}
"""Table tab:mglu_vs_glu_5090."""

GLU_H100: dict[tuple[Shape, int], GluTimes] = {
    ((8192, 2048), 1): GluTimes(0.0395, 0.0485),
    ((8192, 2048), 2): GluTimes(0.0409, 0.0485),
    ((8192, 2048), 4): GluTimes(0.0428, 0.0485),
    ((8192, 2048), 8): GluTimes(0.0483, 0.0485),
    ((14336, 4096), 1): GluTimes(0.1044, 0.1215),
    ((14336, 4096), 2): GluTimes(0.1067, 0.1215),
    ((14336, 4096), 4): GluTimes(0.1110, 0.1215),
    ((14336, 4096), 8): GluTimes(0.1215, 0.1215),
}
"""Table tab:mglu_vs_glu_h100."""

GPUS = {"H100": (MGLU_H100, GLU_H100), "RTX 5090": (MGLU_RTX_5090, GLU_RTX_5090)}
"""The two tables of each GPU."""
