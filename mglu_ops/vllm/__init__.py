"""The plugin that registers MGLU models with vLLM.

vLLM calls `register` in each of its processes, through the entry point `vllm.general_plugins` of this package. Users do
not need to import this module. README.md beside this file lists what is supported.
"""

from .plugin import register

__all__ = ["register"]
