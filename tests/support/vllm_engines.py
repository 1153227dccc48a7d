"""Small models for vLLM, and engines that generate with them in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import mglu_ops

N_MASKS = 3
TWO_RANKS = {"tensor_parallel_size": 2}
BY_EXPERTS = {"enable_expert_parallel": True}
TRANSFORMERS_BACKEND = {"hf_overrides": {"architectures": ["TransformersForCausalLM"]}}

_SCRIPT = """
import json, shutil, sys
from vllm import LLM, SamplingParams

def report(model):
    import mglu_ops
    return str(mglu_ops.fusion_report())

if __name__ == "__main__":  # vLLM spawns processes
    folder, calls, settings, is_reported, then = json.loads(sys.argv[1])
    llm, results = LLM(folder, skip_tokenizer_init=True, **settings), []
    for index, call in enumerate([*calls, *(calls if then else [])]):
        if then and index == len(calls):
            shutil.copytree(then, folder, dirs_exist_ok=True)
            llm.collective_rpc("reload_weights")
            llm.reset_prefix_cache()
        options = {"temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": 0}
        sampling = [SamplingParams(max_tokens=new_tokens, **options) for _, new_tokens in call]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in call], sampling, use_tqdm=False)
        results.append([])
        for output in outputs:
            tokens = list(output.outputs[0].token_ids)
            logprobs = [found[token].logprob for found, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
            results[-1].append((tokens, logprobs, output.num_cached_tokens or 0))
    print("results:", json.dumps(results))
    if is_reported:
        from generate import report  # this file, since a function of __main__ cannot be pickled again
        print("report:", json.dumps(llm.apply_model(report)[0]))
"""

Request = tuple[Sequence[int], int]
"""The tokens of a prompt, and the number of new tokens."""


class Answer(NamedTuple):
    """What an engine generated for a request.

    Attributes:
        tokens: the new tokens.
        logprobs: their log-probabilities.
        cached: number of tokens of the prompt that came from the prefix cache.
    """

    tokens: list[int]
    logprobs: list[float]
    cached: int


def make_small(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A small random model of Transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    experts = {"num_experts": 4, "num_experts_per_tok": 2} if kind in ("qwen3_moe", "mixtral") else {}
    if kind == "qwen3_moe":
        experts |= {"moe_intermediate_size": 32, "mlp_only_layers": [0], "norm_topk_prob": False}
    given = {**sizes, **heads, **experts, "n_masks": N_MASKS, **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(f"mglu_{kind}", **given)).eval()
    for parameter in model.parameters():  # larger than usual initial weights, so that generated tokens differ
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def save_small(
    kind: str, folder: Path, weight_format: str = "dense", dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """Save a small random model with the weights in a format, and return it."""
    model = make_small(kind, **changes).to(dtype)
    if weight_format != "dense":
        mglu_ops.quantize(model, weight_format)
    model.save_pretrained(folder)
    return model


def start(
    model: Path,
    calls: Sequence[Sequence[Request]],
    settings: dict[str, Any],
    *,
    report: bool = False,
    then: Path | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Start vLLM in new processes that generate greedily, one call of `LLM.generate` after the other.

    Args:
        model: the folder of the model. The script of the process is written beside it.
        calls: the requests of each call.
        settings: arguments of `LLM`.
        report: True to print the report of the fusion pass too.
        then: the folder of a checkpoint that is then loaded into the running engine, before all calls are made again.
        variables: environment variables.
    """
    from vllm.platforms import current_platform

    if not current_platform.device_type:
        pytest.skip("this vLLM was built for no device, so that its engine does not start")
    script = model.with_name("generate.py")
    script.write_text(_SCRIPT)
    environment = {
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # sends the function `report` to the process that has the model
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **os.environ,
        **variables,
    }
    if current_platform.is_cpu() and "tensor_parallel_size" in settings:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    command = [sys.executable, str(script), json.dumps([str(model), calls, settings, report, then and str(then)])]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=model.parent,
        env=environment,
        preexec_fn=os.setpgrp,  # so that the processes of vLLM, which hold the pipes too, can be ended
    ) as process:
        try:
            printed_and_logged = process.communicate(timeout=300 if current_platform.is_cpu() else 150)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed_and_logged = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, *printed_and_logged)


def printed(process: subprocess.CompletedProcess[str], name: str) -> Any:
    """What a process of `start` printed under a name. The process must have succeeded."""
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    (line,) = (line for line in process.stdout.splitlines() if line.startswith(f"{name}: "))
    return json.loads(line.removeprefix(f"{name}: "))


def answers(process: subprocess.CompletedProcess[str]) -> list[list[Answer]]:
    """The answers of each call. The process must have succeeded."""
    return [[Answer(*answer) for answer in call] for call in printed(process, "results")]
