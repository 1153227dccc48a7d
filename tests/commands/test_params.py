"""`python -m mglu_ops params`, compared with the paper's numbers and with models that are built."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from benchmarks.decoder import Sizes
from benchmarks.language_model import LanguageModel, count
from mglu_ops.__main__ import main
from mglu_ops.formats import FORMATS
from mglu_ops.nn import GLU, LU, MGLU, MGLUExpertsFeedForward, quantize
from mglu_ops.params import PAPER, ModelSizes, counts

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
    (row,) = [row for row in counts(PAPER[scale], [1, 2, 4, 8]) if (row.name, row.n_masks) == (name, n_masks)]
    assert three_digits(row.weights / 1e6) == weights
    assert three_digits(row.mask_bits / 1e6) == masks
    assert abs(row.storage / 2**20 - megabytes) < 1
    assert row.load == row.storage


@pytest.mark.parametrize(("n_masks", "bits"), [(1, 17), (4, 20), (16, 32)])
def test_the_memory_load_of_a_projection_matches_table_2(n_masks, bits):
    h, d = 2048, 8192
    lu, glu, mglu = counts(PAPER["large"], [n_masks])
    assert [row.projection_load * 8 for row in (lu, glu, mglu)] == [16 * h * d, 32 * h * d, bits * h * d]


def test_models_have_as_many_parameters_as_are_counted():
    sizes = Sizes(layers=3, hidden=48, intermediate=80, heads=6, kv_heads=2, vocabulary=101, context=16)
    given = ModelSizes(48, 80, layers=3, heads=6, kv_heads=2, head_width=8, vocabulary=101)
    lu, glu, mglu = counts(given, [4])
    with torch.device("meta"):
        assert count(LanguageModel(sizes, LU)) == lu.weights
        assert count(LanguageModel(sizes, GLU)) == glu.weights
        assert count(LanguageModel(sizes, partial(MGLU, n_masks=4))) == mglu.weights + mglu.mask_bits


LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}


def test_a_config_of_transformers(tmp_path, capsys):
    """Llama-3.2 1B has 1235814400 parameters."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert main(["params", str(path), "--n-masks", "4", "--json"]) == 0
    (rows,) = json.loads(capsys.readouterr().out).values()
    assert rows[1]["weights"] == 1235814400
    path.write_text(json.dumps({**LLAMA, "tie_word_embeddings": False, "head_dim": 128}))
    assert main(["params", str(path), "--n-masks", "4", "--json"]) == 0
    (untied,) = json.loads(capsys.readouterr().out).values()
    attention = 16 * 2048 * 64 * 2 * 40
    assert untied[1]["weights"] == 1235814400 + 128256 * 2048 + attention
    assert untied[1]["load"] == 2 * (1235814400 + attention + 2048)


@pytest.mark.parametrize(
    ("weight_format", "projection"),
    [
        ("fp8_row", 8192 * 2048 + 4 * 8192),
        ("fp8_block", 8192 * 2048 + 4 * 64 * 16),
        ("int8_row", 8192 * 2048 + 4 * 8192),
        ("int4_group", 8192 * 1024 + 2 * 8192 * 16),
    ],
)
def test_a_format_counts_the_bytes_of_the_stored_weight_and_its_scales(weight_format, projection):
    dense = counts(PAPER["large"], [4])
    for row, dense_row in zip(counts(PAPER["large"], [4], 16, FORMATS[weight_format]), dense, strict=True):
        matrices = 2 if row.name == "SwiGLU" else 1
        assert row.projection_load == matrices * projection + 8192 * 2048 * row.n_masks // 8
        saved = 16 * matrices * (2 * 8192 * 2048 - projection)  # in 16 layers
        assert (row.weights, row.storage, row.load) == (
            dense_row.weights,
            dense_row.storage - saved,
            dense_row.load - saved,
        )
    layer = quantize(MGLU(2048, 8192, n_masks=4, learnable_masks=False, device="meta"), weight_format)
    assert row.projection_load == sum(tensor.nbytes for tensor in layer.state_dict().values())


def test_formats_on_the_command_line(tmp_path, capsys):
    assert main(["params", "small", "--n-masks", "1", "--weight-format", "fp8_row", "--json"]) == 0
    (rows,) = json.loads(capsys.readouterr().out).values()
    assert rows[-1]["projection_load"] == 768 * 3072 * 9 // 8 + 4 * 3072
    assert main(["params", "small", "--weight-format", "fp4"]) == 2
    assert "--weight-format: got 'fp4', must be one of dense, fp8_row" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "hidden_size": 2047, "head_dim": 64}))
    assert main(["params", str(tmp_path / "config.json"), "--weight-format", "int4_group"]) == 2
    assert "--weight-format: got 'int4_group', must be another for an odd h=2047" in capsys.readouterr().err


def test_the_table_and_its_options(capsys):
    assert main(["params", "small", "--n-masks", "3", "--bits", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small: 12 layers, h = 768, d = 3072, vocabulary of 50257"
    assert lines[-1].split()[:4] == ["SwiMGLU", "3", "112.9", "M"]
    assert len(lines) == 5


MIXTRAL = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def test_a_mixture_is_stored_whole_and_a_token_reads_its_experts(tmp_path, capsys):
    """Mixtral 8x7B has 46702792704 parameters."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL))
    arguments = ["params", str(path), "--n-masks", "4"]
    assert main([*arguments, "--json"]) == 0
    (rows,) = json.loads(capsys.readouterr().out).values()
    swiglu, mglu = rows[1:]
    one = 4096 * 14336
    assert swiglu["weights"] == 46702792704
    unread = 32 * 6 * 3 * one + 31999 * 4096  # 6 of 8 experts per layer, and the embedding except one row
    assert swiglu["load"] == 2 * (46702792704 - unread)
    with torch.device("meta"):
        experts = MGLUExpertsFeedForward(8, 4096, 14336, 2, n_masks=4, learnable_masks=False, dtype=torch.bfloat16)
    layer = sum(tensor.nbytes for tensor in experts.state_dict().values())
    rest = 2 * (46702792704 - 32 * (3 * 8 * one + 8 * 4096))
    assert mglu["storage"] == rest + 32 * layer
    assert mglu["projection_load"] == 2 * (2 * one + 4 * one // 8)
    assert main(arguments) == 0
    head = "32 layers, h = 4096, d = 14336, 8 experts, 2 a token, vocabulary of 32000"
    assert capsys.readouterr().out.startswith(f"{path}: {head}\n")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"mlp_only_layers": [0]}, "mlp_only_layers: got [0], must be [] or missing"),
        ({"n_shared_experts": 1}, "n_shared_experts: got 1, must be 0 or missing"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok: got None, must be an int of at least 1"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: got 9, must be at most the number of experts, 8"),
    ],
)
def test_mixtures_of_other_kinds_are_refused(tmp_path, capsys, more, message):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | more))
    assert main(["params", str(tmp_path / "config.json")]) == 2
    assert message in capsys.readouterr().err
