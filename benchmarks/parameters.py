"""Numbers of parameters and sizes of the paper's models (arXiv 2506.23225, Tables 2 and 6).

`python -m benchmarks.parameters` prints the table. It builds the models on the meta device, so nothing is computed.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from benchmarks.decoder import Projection, Sizes, creating
from benchmarks.frames import markdown
from benchmarks.language_model import LanguageModel, count
from mglu_ops.nn import GLU, LU, MGLU

# The paper gives hidden, intermediate, heads and layers. Its numbers of weights imply heads / 4 key and value heads,
# and a tied embedding of GPT-2's 50257 tokens. The large model has the default sizes, those of Llama-3.2 1B.
PAPER = {
    "small": Sizes(layers=12, hidden=768, intermediate=3072, heads=24, kv_heads=6, vocabulary=50257),
    "large": Sizes(vocabulary=50257),
}
KINDS: dict[tuple[str, int], Projection] = {
    ("GELU", 0): partial(LU, activation="gelu"),
    ("SwiGLU", 0): GLU,
    **{("SwiMGLU", n): partial(MGLU, n_masks=n, learnable_masks=False) for n in (1, 2, 4, 8, 16)},
}
"""The layers of the table, by their name and number of masks. The masks are packed."""


class Count(NamedTuple):
    """The parameters of a model in 16 bits, without biases."""

    weights: int  # number of weights
    mask_bits: int  # number of mask bits
    stored: int  # bytes of a checkpoint, which decoding one token reads
    projection: int  # bytes of the gated projection of one layer, (16 + n_masks) h d / 8 for an MGLU


def count_model(sizes: Sizes, kind: Projection) -> Count:
    """Count a model whose feed-forward layers have a gated projection of a kind."""
    with creating("meta", torch.bfloat16):
        weights, layer = count(LanguageModel(sizes, kind)), kind(sizes.hidden, sizes.intermediate)
    projection = sum(tensor.nbytes for tensor in layer.state_dict().values())
    masks = sizes.layers * (projection - 2 * count(layer))
    return Count(weights, 8 * masks, 2 * weights + masks, projection)


def table() -> str:
    """The table in Markdown."""
    head = ("model", "layer", "n_m", "weights, M", "mask bits, M", "stored, MiB", "of SwiGLU", "projection, MiB")
    lines = []
    for scale, sizes in PAPER.items():
        found = {key: count_model(sizes, kind) for key, kind in KINDS.items()}
        for (name, n_masks), one in found.items():
            counts = (f"{one.weights / 1e6:.1f}", f"{one.mask_bits / 1e6:.1f}", f"{one.stored / 2**20:.1f}")
            ratio = f"{one.stored / found['SwiGLU', 0].stored:.1%}"
            lines.append((scale, name, n_masks, *counts, ratio, f"{one.projection / 2**20:.1f}"))
    return markdown(head, lines)


if __name__ == "__main__":
    print(table())
