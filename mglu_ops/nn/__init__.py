"""Modules (MGLU, feed-forward blocks, experts, naive layers, baselines), `freeze`, `quantize` and `dequantize`.

For training, `parameter_groups` makes groups for the optimizer, `MaskStatistics` computes numbers for the log, and
`convert` and `from_swiglu` convert a trained model. For ONNX, `decompose` writes out the fused operators.
"""

from .baselines import GLU, LU
from .conversion import from_swiglu
from .decomposing import decompose
from .experts import ExpertsDown, MGLUExperts, MGLUExpertsFeedForward, NaiveMGLUExperts
from .feed_forward import GeMGLU, MGLUFeedForward, ReMGLU, SwiMGLU
from .fitted_conversion import convert
from .freezing import freeze
from .mask_statistics import MaskStatistics, flip_ratio, gate_ratio, mask_agreement
from .mglu import MGLU
from .naive import NaiveMGLU
from .optimizer import check_mask_lr, parameter_groups
from .packed_buffers import check_masks
from .quantizing import dequantize, quantize

__all__ = [
    "GLU",
    "LU",
    "MGLU",
    "ExpertsDown",
    "GeMGLU",
    "MGLUExperts",
    "MGLUExpertsFeedForward",
    "MGLUFeedForward",
    "MaskStatistics",
    "NaiveMGLU",
    "NaiveMGLUExperts",
    "ReMGLU",
    "SwiMGLU",
    "check_mask_lr",
    "check_masks",
    "convert",
    "decompose",
    "dequantize",
    "flip_ratio",
    "freeze",
    "from_swiglu",
    "gate_ratio",
    "mask_agreement",
    "parameter_groups",
    "quantize",
]
