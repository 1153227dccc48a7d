"""`python -m mglu_ops params`: parameters, storage and memory traffic of models with SwiGLU and with SwiMGLU.

Importing this module does not import torch.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError

if TYPE_CHECKING:
    from .formats import WeightFormat

DESCRIPTION = (
    "Compares feed-forward layers in a decoder like Llama. Prints the number of weights and of mask bits, the size of "
    "a checkpoint with packed masks, and the bytes that decoding one token reads. Norms and embeddings count, biases "
    "do not. In a mixture of experts, a token reads its own experts only. The models 'small' and 'large' come from "
    "the paper (arXiv 2506.23225, Tables 5 and 6)."
)
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a decoder like Llama."""

    hidden: int  # h, the features of the residual stream
    intermediate: int  # d, the features inside a feed-forward layer
    layers: int  # number of decoder blocks
    heads: int  # number of query heads
    kv_heads: int  # number of key and value heads
    head_width: int  # features of a head
    vocabulary: int  # number of tokens
    tied: bool = True  # True if the embedding and the head are one matrix
    experts: int | None = None  # experts of a feed-forward layer; None for a layer without a router
    top_k: int = 1  # experts that compute a token

    @property
    def shared_weights(self) -> int:
        """The weights that do not depend on the kind of feed-forward layer."""
        attention = self.hidden * self.head_width * 2 * (self.heads + self.kv_heads)
        router = self.hidden * (self.experts or 0)
        layer = attention + router + 2 * self.hidden
        return self.layers * layer + self.hidden + self.embedding * (1 if self.tied else 2)

    @property
    def embedding(self) -> int:
        """The weights of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def projection(self) -> int:
        """The weights of one matrix `[d, h]` in every layer and expert."""
        return self.layers * (self.experts or 1) * self.hidden * self.intermediate


# The paper gives h, d, heads and layers. Its numbers of weights imply heads / 4 key and value heads, and a tied
# embedding of GPT-2's 50257 tokens.
PAPER = {
    "small": ModelSizes(768, 3072, layers=12, heads=24, kv_heads=6, head_width=32, vocabulary=50257),
    "large": ModelSizes(2048, 8192, layers=16, heads=32, kv_heads=8, head_width=64, vocabulary=50257),
}

KEYS = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "vocabulary": "vocab_size",
}
"""The keys of sizes that a `config.json` of Transformers must have."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of the number of experts; a config has at most one of them."""
_UNLIKE_EXPERTS = {
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 0,
    "n_shared_experts": 0,
    "shared_expert_intermediate_size": 0,
}
"""Keys that describe other feed-forward layers beside the experts, with the value that means that there are none."""


@dataclass(frozen=True)
class Count:
    """The parameters, storage and reads of a model with one kind of feed-forward layer.

    `load` counts every weight once. Of the experts it counts only top_k, and of an untied embedding only one row.
    `projection_load` is the paper's Table 2: `(16 + n_masks) h d` bits for an MGLU in 16 bits.
    """

    name: str  # the kind of feed-forward layer
    n_masks: int  # 0 without masks
    weights: int  # number of weights
    mask_bits: int  # number of mask bits
    storage: int  # bytes of a checkpoint with packed masks
    load: int  # bytes that decoding one token reads
    projection_load: int  # the part of `load` for the first projection of one feed-forward layer


def counts(
    sizes: ModelSizes, masks: Sequence[int], bits: int = 16, weight_format: WeightFormat | None = None
) -> list[Count]:
    """Count a model with GELU, with SwiGLU, and with SwiMGLU for each number of masks.

    A weight has `bits` bits. `weight_format` (`mglu_ops.formats`) applies only to the first projection of each
    feed-forward layer.
    """
    matrix = _matrix_bits(sizes, bits, weight_format)
    others = sizes.shared_weights + sizes.projection
    row_only = 0 if sizes.tied else sizes.embedding - sizes.hidden
    idle = (sizes.experts or 1) - sizes.top_k  # experts of a layer that a token does not read
    one = sizes.hidden * sizes.intermediate
    found = []
    for name, matrices, n_masks in (("GELU", 1, 0), ("SwiGLU", 2, 0), *(("SwiMGLU", 1, n_masks) for n_masks in masks)):
        first = matrices * matrix + n_masks * one  # bits of the first projection of one expert
        storage = others * bits + sizes.layers * (sizes.experts or 1) * first
        count = Count(
            name,
            n_masks,
            others + matrices * sizes.projection,
            n_masks * sizes.projection,
            storage=storage // 8,
            load=(storage - row_only * bits - sizes.layers * idle * (one * bits + first)) // 8,
            projection_load=sizes.top_k * first // 8,
        )
        found.append(count)
    return found


def _matrix_bits(sizes: ModelSizes, bits: int, weight_format: WeightFormat | None) -> int:
    """The bits of a matrix `[d, h]` and its scales."""
    d, h = sizes.intermediate, sizes.hidden
    if weight_format is None or weight_format.dtype is None or weight_format.scale_dtype is None:
        return d * h * bits
    if h % weight_format.packed:
        raise ValueError(f"weight_format: got {weight_format.name!r}, must be another for an odd h={h}")
    scales = math.prod(weight_format.scale_shape(d, h))
    return 8 * (
        d * h // weight_format.packed * weight_format.dtype.itemsize + scales * weight_format.scale_dtype.itemsize
    )


def sizes_of_config(config: Mapping[str, Any]) -> ModelSizes:
    """The sizes in a `config.json` of Transformers.

    Raises:
        ValueError: a size is missing or not a positive int, or there are feed-forward layers beside the experts.
    """
    found = {name: _size(config, key) for name, key in KEYS.items()}
    if (key := next((key for key in _EXPERTS if config.get(key) is not None), None)) is not None:
        for other, plain in _UNLIKE_EXPERTS.items():
            if config.get(other) not in (None, plain):
                raise ValueError(
                    f"{other}: got {config[other]!r}, must be {plain!r} or missing: every layer must have the same "
                    "experts, and no others"
                )
        found["intermediate"] = _size(config, "moe_intermediate_size", found["intermediate"])
        found |= {"experts": _size(config, key), "top_k": _size(config, "num_experts_per_tok")}
        if found["top_k"] > found["experts"]:
            raise ValueError(
                f"num_experts_per_tok: got {found['top_k']}, must be at most the number of experts, {found['experts']}"
            )
    kv_heads = _size(config, "num_key_value_heads", found["heads"])
    head_width = _size(config, "head_dim", found["hidden"] // found["heads"])
    return ModelSizes(**found, kv_heads=kv_heads, head_width=head_width, tied=bool(config.get("tie_word_embeddings")))


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key}: got {value!r}, must be an int of at least 1")
    return value


def add_parser(subparsers: Any) -> None:
    """Add `params` to the commands."""
    parser = subparsers.add_parser(
        "params", help="count the parameters, bytes and memory traffic of models", description=DESCRIPTION
    )
    parser.add_argument(
        "models", nargs="*", default=list(PAPER), metavar="MODEL", help="small, large, or a config.json of Transformers"
    )
    parser.add_argument("--n-masks", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N", help="1 to 16")
    parser.add_argument("--bits", type=int, default=16, metavar="N", help="bits of a weight (default: 16)")
    parser.add_argument(
        "--weight-format",
        default="dense",
        metavar="NAME",
        help="store the first projection of each feed-forward layer, with its scales, as fp8_row, fp8_block, int8_row "
        "or int4_group (default: dense, in --bits)",
    )
    parser.add_argument("--json", action="store_true", help="print numbers and bytes as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the tables and return the exit code. Raises UserError for a wrong option or file."""
    from .formats import get_format
    from .masks import MAX_MASKS

    for n_masks in options.n_masks:
        if not 1 <= n_masks <= MAX_MASKS:
            raise UserError(f"--n-masks: got {n_masks}, must be from 1 to {MAX_MASKS}")
    if options.bits < 1:
        raise UserError(f"--bits: got {options.bits}, must be at least 1")
    models = {name: _sizes(name) for name in options.models}
    try:
        chosen = get_format(options.weight_format)
        found = {name: counts(sizes, options.n_masks, options.bits, chosen) for name, sizes in models.items()}
    except ValueError as error:
        raise UserError(f"--weight-format: {str(error).removeprefix('weight_format: ')}") from error
    if options.json:
        print(json.dumps({model: [asdict(row) for row in rows] for model, rows in found.items()}))
        return 0
    print("\n\n".join(_table(name, models[name], rows) for name, rows in found.items()))
    return 0


def _sizes(model: str) -> ModelSizes:
    if model in PAPER:
        return PAPER[model]
    try:
        config = json.loads(Path(model).read_text())
        if not isinstance(config, dict):
            raise ValueError(f"got {type(config).__name__}, must be a JSON object")
        return sizes_of_config(config)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"{model}: {error}; must be {', '.join(PAPER)} or a config.json of Transformers") from error


def _table(name: str, sizes: ModelSizes, rows: Sequence[Count]) -> str:
    head = ("", "n_m", "weights", "mask bits", "stored", "read a token", "of SwiGLU", "projection")
    swiglu = next(row for row in rows if row.name == "SwiGLU")
    lines = [
        (
            row.name,
            str(row.n_masks or ""),
            _millions(row.weights),
            _millions(row.mask_bits) if row.mask_bits else "",
            _megabytes(row.storage),
            _megabytes(row.load),
            f"{row.load / swiglu.load:.1%}",
            _megabytes(row.projection_load),
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    text = (
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in (head, *lines)
    )
    layers = f"{sizes.layers} layers, h = {sizes.hidden}, d = {sizes.intermediate}"
    if sizes.experts:
        layers += f", {sizes.experts} experts, {sizes.top_k} a token"
    return "\n".join([f"{name}: {layers}, vocabulary of {sizes.vocabulary}", *text])


def _millions(number: int) -> str:
    return f"{number / 1e6:.1f} M"


def _megabytes(size: int) -> str:
    return f"{size / MEGABYTE:.1f} MiB"
