"""MGLU layers on several GPUs, with torch's own tools: DTensor, `parallelize_module` and `fully_shard`.

README.md beside this file has examples. Importing this package imports `torch.distributed.tensor`.
"""

from .colwise import ColwiseMGLU
from .experts import ParallelExperts
from .fsdp import shard_placement_fn

__all__ = ["ColwiseMGLU", "ParallelExperts", "register_transformers_style", "shard_placement_fn"]


def register_transformers_style() -> None:
    """Register the tensor-parallel styles for MGLU layers with Transformers, for the `tp_plan` of a model.

        tp_plan = {"layers.*.mlp.mglu": "mglu_colwise", "layers.*.mlp.down_proj": "rowwise"}

    `from_pretrained` then gives each rank its rows of the weight and of the logits or packed masks. In plans of
    mixtures the style of `"layers.*.mlp.experts"` is `"mglu_expert_rows"`, or `"mglu_experts"` for expert parallelism.
    `import mglu_ops.transformers` calls this function.

    Raises:
        ImportError: transformers 5.17 or later is not installed.
    """
    try:
        from .transformers_style import register
    except ImportError as error:
        raise ImportError(
            "register_transformers_style: needs transformers 5.17 or later: in a clone of mglu_ops, call "
            f'pip install ".[transformers]" ({error})'
        ) from error
    register()
