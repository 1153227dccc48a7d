"""All rules of the recogniser: importing their modules registers them, and their order is that of the rules."""

from __future__ import annotations

from ..recognise import Recogniser, RuleError
from . import gates, masks, projections, weights

__all__ = ["Recogniser", "RuleError", "gates", "masks", "projections", "weights"]
