"""MGLU models in vLLM: the plugin that registers them.

vLLM calls `register` in each of its processes, through the entry point `vllm.general_plugins` of this package. Nobody
else needs to import this module. README.md beside it says what runs.
"""

from .plugin import register

__all__ = ["register"]
