"""Keeps Transformers offline in these tests, and without progress bars."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported

from transformers.utils import logging

logging.disable_progress_bar()
