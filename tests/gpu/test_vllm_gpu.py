"""vLLM's engine on a GPU, with CUDA graphs and piecewise compilation, against Transformers on the same GPU.

A start of vLLM takes 20 to 40 s, so each one answers several calls: a batch whose size changes from step to step, with
a prompt that is longer than a step (chunked prefill); the same batch again (prefix cache); and one request alone.
tests/serving has the plugin's other tests, on CPUs. The file takes 4 minutes in eight processes (`-n 8`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed on every machine with a GPU")
pytest.importorskip("mglu_ops.transformers")
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.commands import ROOT
from tests.support.vllm_engines import (
    BY_EXPERTS,
    TRANSFORMERS_BACKEND,
    TWO_RANKS,
    Answer,
    Request,
    answers,
    printed,
    save_small,
    start,
)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:mglu..")]  # small layers may run on slow backends

DEVICE = "cuda"
STEP = 64  # tokens of a step
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": STEP,
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 64 << 20,
    "gpu_memory_utilization": 0.03,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
}
REMOTE = {"trust_remote_code": True}
SIZES = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256}


def prompt(length: int) -> list[int]:
    return torch.randint(1, 128, (length,), generator=torch.Generator().manual_seed(length)).tolist()


LONG = 150
REQUESTS: list[Request] = [(prompt(6), 12), (prompt(1), 3), (prompt(23), 9), (prompt(LONG), 12), (prompt(40), 1)]
CALLS = [REQUESTS, REQUESTS, REQUESTS[:1]]


def save(kind: str, folder: Path, weight_format: str = "dense", **changes: Any) -> None:
    experts = {"moe_intermediate_size": 128} if kind == "qwen3_moe" else {}
    save_small(kind, folder, weight_format, torch.bfloat16, **SIZES, **experts, **changes)


@torch.no_grad()
def logprobs_of_transformers(folder: Path, dtype: torch.dtype, found: Sequence[tuple[Request, Answer]]) -> torch.Tensor:
    """Log-probabilities of all tokens at each place where the engine has generated one, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **REMOTE).to(DEVICE).eval()
    rows = []
    for (tokens, _), answer in found:
        sequence = torch.tensor([[*tokens, *answer.tokens]], device=DEVICE)
        rows.append(model(sequence).logits[0, len(tokens) - 1 : -1].float().log_softmax(-1))
    return torch.cat(rows)


def check(
    folder: Path, calls: Sequence[Sequence[Request]], answered: Sequence[Sequence[Answer]], share: float = 1.0
) -> None:
    """Compare answers with Transformers in float32, which is given the engine's own tokens at each place.

    The engine's error may be twice as large as the one of Transformers in bfloat16. A greedy token must be the most
    probable one, unless it ties with another within that error. `share` of the places must agree: where the experts or
    masks of a token tie, bfloat16 may choose others than float32.
    """
    found = [pair for call, answer in zip(calls, answered, strict=True) for pair in zip(call, answer, strict=True)]
    exact = logprobs_of_transformers(folder, torch.float32, found)
    theirs = (logprobs_of_transformers(folder, torch.bfloat16, found) - exact).abs().amax(-1)
    tokens = torch.tensor([token for _, answer in found for token in answer.tokens], device=DEVICE)
    of_tokens = exact.gather(1, tokens[:, None])[:, 0]
    ours = (torch.tensor([one for _, answer in found for one in answer.logprobs], device=DEVICE) - of_tokens).abs()
    allowed = 2 * theirs.quantile(share) + 0.01
    assert ours.quantile(share) <= allowed
    assert (exact.amax(-1) - of_tokens).quantile(share) <= 2 * allowed, "a token is not the most probable one"
    assert len(tokens.unique()) > 5
    assert allowed < 0.5 * exact.std(), "the limit would let wrong results pass"


MODELS = [
    ("llama", "dense", {"mask_top_k": 2}),
    ("mistral", "int8_row", {"learnable_masks": False}),
    ("qwen3", "fp8_block", {"learnable_masks": False}),
    ("llama", "fp8_row", {"learnable_masks": False, "n_masks": 1}),
    ("llama", "int4_group", {"learnable_masks": False, "n_masks": 4}),
    ("qwen3_moe", "dense", {"mask_top_k": 2}),
    ("mixtral", "dense", {"learnable_masks": False}),
    ("mixtral", "fp8_row", {"learnable_masks": False, "n_masks": 1}),
    ("qwen3_moe", "int4_group", {"learnable_masks": False, "n_masks": 4}),
]


@pytest.mark.parametrize(("kind", "weight_format", "changes"), MODELS, ids=str)
def test_the_engine_agrees_with_transformers(
    kind: str, weight_format: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    save(kind, tmp_path / "model", weight_format, **changes)
    answered = answers(start(tmp_path / "model", CALLS, ENGINE))
    is_routed = "mask_top_k" in changes or kind in ("qwen3_moe", "mixtral")
    check(tmp_path / "model", CALLS, answered, share=0.8 if is_routed else 1.0)
    assert answered[0][3].cached == 0
    assert answered[1][3].cached >= LONG // 16 * 16 - 16, "the second call finds the long prompt in the prefix cache"


def test_a_second_start_finds_its_compiled_code(tmp_path: Path) -> None:
    save("llama", tmp_path / "model", learnable_masks=False)
    cache = tmp_path / "cache"

    def compiled() -> set[Path]:
        return {path for path in (cache / "torch_compile_cache").rglob("*") if len(path.relative_to(cache).parts) <= 4}

    first, files = answers(start(tmp_path / "model", CALLS, ENGINE, VLLM_CACHE_ROOT=str(cache))), compiled()
    check(tmp_path / "model", CALLS, first)
    assert files
    process = start(tmp_path / "model", CALLS, ENGINE, VLLM_CACHE_ROOT=str(cache))
    check(tmp_path / "model", CALLS, answers(process))
    assert compiled() == files
    assert "Compiling model again" not in process.stdout + process.stderr, "vLLM could not load its compiled code"


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_batch_invariant_mode_gives_each_request_the_same_bits_in_every_batch(kind: str, tmp_path: Path) -> None:
    """Prompts are not divided, because the division depends on the batch; and nothing comes from a cache."""
    save(kind, tmp_path / "model", learnable_masks=False)
    calls = [REQUESTS, *([request] for request in REQUESTS)]
    settings = {**ENGINE, "max_num_batched_tokens": 256, "enable_prefix_caching": False}
    together, *alone = answers(start(tmp_path / "model", calls, settings, VLLM_BATCH_INVARIANT="1"))
    assert [answer for (answer,) in alone] == together
    check(tmp_path / "model", [REQUESTS], [together], share=0.8 if kind == "mixtral" else 1.0)


def test_the_transformers_backend(tmp_path: Path) -> None:
    save("llama", tmp_path / "model", learnable_masks=False)
    answered = answers(start(tmp_path / "model", CALLS, {**ENGINE, **TRANSFORMERS_BACKEND}))
    check(tmp_path / "model", CALLS, answered)


def test_the_example_serves_what_it_has_trained(tmp_path: Path) -> None:
    """One command trains a model and asks vLLM's HTTP server. The answer has one byte a token."""
    one_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # Trainer would train on all of them
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": one_gpu}
    command = [sys.executable, str(ROOT / "examples" / "serve_vllm.py"), "--prompt", "def main(", "--steps", "20"]
    process = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False, timeout=300
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    text = process.stdout.split("\ndef main(")[1].removesuffix("\n")
    answer = Answer(list(text.encode()), [], 0)
    assert len(answer.tokens) == 20
    model = tmp_path / "build" / "examples" / "mglu-llama-frozen"
    (logprobs,) = logprobs_of_transformers(model, torch.float32, [((list(b"def main("), 20), answer)]).split(20)
    chosen = logprobs.gather(1, torch.tensor(answer.tokens, device=DEVICE)[:, None])[:, 0]
    assert (logprobs.amax(-1) - chosen).max() < 0.2, "a token is not the most probable one"
    assert logprobs.std() > 1, "the limit would let wrong results pass"


PLAIN = """
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

class PlainConfig(LlamaConfig):
    model_type = "plain"

class PlainMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.intermediate_size, config.hidden_size))
        self.mask_logits = nn.Parameter(torch.empty(2, config.intermediate_size, config.hidden_size))
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        y = 0
        for logits in self.mask_logits:
            mask = (logits > 0).to(x.dtype)
            y = y + F.silu(F.linear(x, self.weight * mask)) * F.linear(x, self.weight * (1 - mask))
        return self.down_proj(y)

class PlainModel(LlamaModel):
    config_class = PlainConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers:
            layer.mlp = PlainMLP(config)

class PlainForCausalLM(LlamaForCausalLM):
    config_class = PlainConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = PlainModel(config)
"""


def save_plain(folder: Path) -> None:
    """Save a model whose code is in its folder, and has a plain spelling of MGLU."""
    folder.mkdir()
    (folder / "modeling_plain.py").write_text(PLAIN)
    classes = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
    config = {"model_type": "plain", "vocab_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 256, **SIZES}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "architectures": ["PlainForCausalLM"]}
    config["auto_map"] = {auto: f"modeling_plain.Plain{name}" for auto, name in classes.items()}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, **REMOTE), **REMOTE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))


def test_a_plain_spelling_is_fused_in_the_engine(tmp_path: Path) -> None:
    save_plain(tmp_path / "model")
    settings = {**ENGINE, **REMOTE, "model_impl": "transformers"}
    process = start(tmp_path / "model", CALLS, settings, report=True, MGLU_VLLM_FUSION="strict")
    assert re.search(r"[1-9]\d* fused, 0 missed", printed(process, "report"))
    check(tmp_path / "model", CALLS, answers(process))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize(
    ("kind", "weight_format", "options"),
    [
        ("llama", "fp8_row", {}),
        ("qwen3_moe", "dense", BY_EXPERTS),
        ("mixtral", "fp8_row", {}),
    ],
    ids=str,
)
def test_two_ranks(kind: str, weight_format: str, options: dict[str, Any], tmp_path: Path) -> None:
    save(kind, tmp_path / "model", weight_format, learnable_masks=False)
    answered = answers(start(tmp_path / "model", CALLS, {**ENGINE, **TWO_RANKS, **options}))
    check(tmp_path / "model", CALLS, answered, share=1.0 if kind == "llama" else 0.8)
