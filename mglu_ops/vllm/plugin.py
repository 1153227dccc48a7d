"""The function that vLLM calls in each of its processes: it registers the MGLU architectures, and may enable fusion."""

from __future__ import annotations

import importlib
import os

import mglu_ops
from mglu_ops import notices

ARCHITECTURES = (
    *("MGLULlamaForCausalLM", "MGLUMistralForCausalLM", "MGLUQwen3ForCausalLM"),
    *("MGLUQwen3MoeForCausalLM", "MGLUMixtralForCausalLM"),
)
"""The names in `config.architectures` that `mglu_ops.transformers` writes; also the classes in `models.py`."""

FUSION = "MGLU_VLLM_FUSION"
"""The environment variable that enables fusion in vLLM, whose processes inherit it: `1` or `strict`."""


def register() -> None:
    """Register the MGLU architectures and quantization config with vLLM, and their configs with Transformers.

    It may be called repeatedly.

    vLLM imports the classes of models later, when it loads such a model. If `mglu_ops.transformers` cannot be imported,
    a warning says so and other models of vLLM are unaffected. Fusion is enabled if `MGLU_VLLM_FUSION` is set.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: `MGLU_VLLM_FUSION` is neither `1` nor `strict`.
    """
    try:
        from vllm import ModelRegistry
    except ImportError as error:
        raise ImportError(f"{error}; mglu_ops.vllm is a plugin of vLLM: pip install vllm") from error
    enable_fusion_from_environment()
    try:
        importlib.import_module("mglu_ops.transformers")  # registers the configs with AutoConfig
    except ImportError as error:
        notices.warn(f"mglu_ops: vLLM cannot load MGLU models: {error}", stacklevel=2)
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    from .quantization import METHOD, MGLUConfig

    register_quantization_config(METHOD)(MGLUConfig)
    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"{__package__}.models:{architecture}")


def enable_fusion_from_environment() -> None:
    """Enable the fusion pass in this process if `MGLU_VLLM_FUSION` is set; warn if it is enabled in another way.

    A vLLM model runs in other processes than the one that made it, and `mglu_ops.enable_fusion()` applies only to its
    own process. vLLM also keeps compiled code on disk, under a key that does not include the pass, so that a model
    could run unfused code from an earlier start. With the variable, that cache is off (`VLLM_DISABLE_COMPILE_CACHE`).

    Raises:
        ValueError: the variable is neither `1` nor `strict`.
    """
    from mglu_ops.passes import current_pass  # imports Inductor

    value = os.environ.get(FUSION)
    if value is None:
        if current_pass() is not None:
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
