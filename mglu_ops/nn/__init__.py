"""Modules: the MGLU projection and feed-forward blocks, the paper's naive layer, baselines, and `freeze`."""

from .baselines import GLU, LU
from .feed_forward import GeMGLU, MGLUFeedForward, ReMGLU, SwiMGLU
from .freezing import freeze
from .mglu import MGLU
from .naive import NaiveMGLU

__all__ = ["GLU", "LU", "MGLU", "GeMGLU", "MGLUFeedForward", "NaiveMGLU", "ReMGLU", "SwiMGLU", "freeze"]
