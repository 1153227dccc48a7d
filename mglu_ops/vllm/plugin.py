"""`register`, which vLLM calls in each of its processes. It registers the MGLU architectures, and may enable fusion."""

from __future__ import annotations

import importlib
import os

import mglu_ops
from mglu_ops import notices, passes

ARCHITECTURES = (
    *("MGLULlamaForCausalLM", "MGLUMistralForCausalLM", "MGLUQwen3ForCausalLM"),
    *("MGLUQwen3MoeForCausalLM", "MGLUMixtralForCausalLM"),
)
"""The names that `mglu_ops.transformers` writes to `config.architectures`; `models.py` has classes of these names."""

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""The environment variable of vLLM that makes the result of a request independent of the batch."""

FUSION = "MGLU_VLLM_FUSION"
"""The environment variable that enables fusion in all processes of vLLM, if it is `1` or `strict`."""


def register() -> None:
    """Register the MGLU architectures and quantization config with vLLM, and their configs with Transformers.

    The function may be called again. vLLM imports the classes of MGLU models only when it loads such a model. If
    `mglu_ops.transformers` cannot be imported, there is a warning, and vLLM still loads other models. Fusion is enabled
    if `MGLU_VLLM_FUSION` is set, and the batch-invariant mode of this package if vLLM's own is.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: `MGLU_VLLM_FUSION` is neither `1` nor `strict`.
    """
    try:
        from vllm import ModelRegistry
    except ImportError as error:
        raise ImportError(f"{error}; mglu_ops.vllm is a plugin of vLLM: pip install vllm") from error
    enable_fusion_from_environment()
    if os.environ.get(BATCH_INVARIANT, "0") != "0":  # vLLM reads it as an int
        mglu_ops.set_batch_invariant_mode(True)
    try:
        importlib.import_module("mglu_ops.transformers")  # importing it registers the configs with AutoConfig
    except ImportError as error:
        notices.warn(f"mglu_ops: vLLM cannot load MGLU models: {error}", stacklevel=2)
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    from .quantization import METHOD, MGLUConfig

    register_quantization_config(METHOD)(MGLUConfig)
    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"{__package__}.models:{architecture}")


def enable_fusion_from_environment() -> None:
    """Enable the fusion pass in this process if `MGLU_VLLM_FUSION` is set. Warn if the pass is enabled without it.

    `mglu_ops.enable_fusion()` applies only to its own process, but vLLM runs models in other processes. vLLM also keeps
    compiled code on disk, under a key that does not include the pass, so a model could run unfused code from an earlier
    start. This function therefore turns that cache off (`VLLM_DISABLE_COMPILE_CACHE`).

    Raises:
        ValueError: the variable is neither `1` nor `strict`.
    """
    value = os.environ.get(FUSION)
    if value is None:
        if passes.is_imported() and passes.current_pass() is not None:
            notices.warn(
                "mglu_ops.enable_fusion() holds in this process only, while vLLM runs models in processes of its own "
                f"and reuses code that was compiled without fusion; set {FUSION}=1 in the environment to fuse in vLLM",
                stacklevel=3,
            )
        return
    if value not in ("1", "strict"):
        raise ValueError(f"{FUSION}: got {value!r}, must be '1' or 'strict', or not be set")
    os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"
    mglu_ops.enable_fusion(strict=value == "strict")
