"""The table of parameters and sizes, compared with the paper's numbers."""

from __future__ import annotations

import pytest

from benchmarks.parameters import KINDS, PAPER, count_model

# Table 6 of arXiv 2506.23225: scale, model, n_masks, millions of weights, millions of mask bits, and size in MB.
PUBLISHED = [
    ("small", "GELU", 0, 113, 0, 215),
    ("small", "SwiGLU", 0, 141, 0, 269),
    ("small", "SwiMGLU", 1, 113, 28.3, 219),
    ("small", "SwiMGLU", 2, 113, 56.6, 222),
    ("small", "SwiMGLU", 4, 113, 113, 229),
    ("small", "SwiMGLU", 8, 113, 226, 242),
    ("large", "SwiGLU", 0, 1080, 0, 2052),
    ("large", "SwiMGLU", 1, 808, 268, 1573),
    ("large", "SwiMGLU", 2, 808, 537, 1605),
    ("large", "SwiMGLU", 4, 808, 1070, 1669),
]


def three_digits(number: float) -> float:
    return float(f"{number:.3g}")


@pytest.mark.parametrize(("scale", "name", "n_masks", "weights", "masks", "megabytes"), PUBLISHED)
def test_the_paper_published_the_same_numbers(scale, name, n_masks, weights, masks, megabytes):
    """The paper rounds the sizes of large models up to whole MB, so sizes may differ by up to 1 MB."""
    found = count_model(PAPER[scale], KINDS[name, n_masks])
    assert three_digits(found.weights / 1e6) == weights
    assert three_digits(found.mask_bits / 1e6) == masks
    assert abs(found.stored / 2**20 - megabytes) < 1


@pytest.mark.parametrize(
    ("kind", "bits"),
    [(("GELU", 0), 16), (("SwiGLU", 0), 32), (("SwiMGLU", 1), 17), (("SwiMGLU", 4), 20), (("SwiMGLU", 16), 32)],
)
def test_the_memory_load_of_a_projection_matches_table_2(kind, bits):
    assert count_model(PAPER["large"], KINDS[kind]).projection * 8 == bits * 2048 * 8192
