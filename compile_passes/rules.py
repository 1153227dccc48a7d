"""All rules of the recogniser: importing their modules registers them."""

from __future__ import annotations

from . import gated_rules, mask_rules, projection_rules, weight_rules
from .recognise import Recogniser

__all__ = ["Recogniser", "gated_rules", "mask_rules", "projection_rules", "weight_rules"]
