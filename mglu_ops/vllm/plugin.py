"""What vLLM calls in each of its processes: it makes the MGLU architectures known."""

from __future__ import annotations

import warnings

ARCHITECTURES = ("MGLULlamaForCausalLM", "MGLUMistralForCausalLM", "MGLUQwen3ForCausalLM")
"""The names in `config.architectures` that `mglu_ops.transformers` writes; classes of `models.py` have the same."""


def register() -> None:
    """Register the MGLU architectures with vLLM, and their configs with Transformers. It may be called repeatedly.

    vLLM imports the classes later, when it loads such a model. If `mglu_ops.transformers` cannot be imported, a warning
    says so and other models of vLLM are unaffected.

    Raises:
        ImportError: vLLM is not installed.
    """
    from vllm import ModelRegistry

    try:
        import mglu_ops.transformers  # noqa: F401 (registers the configs with AutoConfig)
    except ImportError as error:
        warnings.warn(f"mglu_ops: vLLM cannot load MGLU models: {error}", UserWarning, stacklevel=2)
        return
    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"{__package__}.models:{architecture}")
