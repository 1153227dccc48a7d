"""One start of vLLM for benchmarks/serve.py, in processes of its own.

`serve.py` writes a `Spec` as JSON and runs `main` with its path. Answers are lines of JSON in the file `Spec.answers`:
the first one has the time of the start-up, and each line on the standard input asks for one measurement. All times are
in microseconds.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from mglu_ops.formats import get_format

PROMPT, NEW_TOKENS = 16, 128
"""Tokens of a prompt before decoding, and of each sequence that is decoded."""
PROMPTS = (8, 1024)
"""Number and length of the prompts of `prompts`, for which one step has room."""
PROMPT_ROUNDS = 3
"""Calls with these prompts for each round, because such a call is short and its time varies."""
REQUESTS, PROMPT_RANGE, NEW_RANGE = 64, (128, 1024), (16, 256)
"""Number of requests of the mixed load, and the ranges of their prompts and of their new tokens."""
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "max_num_seqs": 256,
    "max_num_batched_tokens": PROMPTS[0] * PROMPTS[1],
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": 8 << 30,
    "gpu_memory_utilization": 0.05,  # kv_cache_memory_bytes decides; this much must be free, beside other engines too
}
"""The arguments of `LLM` that are the same for all variants."""
VOCABULARY = 32000
"""Tokens of prompts are below this number, which no vocabulary is smaller than."""
WEIGHT_RANGE = 1e-3  # as vLLM's own dummy weights


@dataclass(frozen=True)
class Spec:
    """What a process starts and measures.

    Attributes:
        folder: the folder of the model's config.json.
        engine: arguments of `LLM`, besides the folder.
        sequences: the numbers of sequences for which decoding is measured.
        rounds: calls of each kind in each answer; of `prompts`, `PROMPT_ROUNDS` times as many.
        answers: the file to which answers are appended.
        profile: the folder for a profile of `sequences[0]`, in place of times; empty for none.
    """

    folder: str
    engine: dict[str, Any]
    sequences: Sequence[int]
    rounds: int
    answers: str
    profile: str = ""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


@torch.no_grad()
def fill(model: nn.Module) -> float:
    """Fill what `load_format="dummy"` leaves without a usual value, and return the share of ones among the masks' bits.

    vLLM draws floating parameters, but leaves masks zero, and makes norms and scales so small that activations vanish.
    Here masks become random bits, norms become 1, and stored weights are quantized from weights in vLLM's range.
    vLLM calls this function in the process that has the model.
    """
    ones = bits = 0
    for name, parameter in model.named_parameters():
        if "norm" in name and parameter.dim() == 1:
            parameter.fill_(1)
    for module in model.modules():
        if isinstance(masks := getattr(module, "packed_masks", None), Tensor):
            columns: Any = module.in_features
            if columns % 8:
                raise ValueError(f"in_features: got {columns}, must be a multiple of 8, so that masks have no padding")
            masks.random_(0, 256, generator=torch.Generator(masks.device).manual_seed(0))
            sample = masks.flatten()[:4096, None].to(torch.int32) >> torch.arange(8, device=masks.device) & 1
            ones, bits = ones + int(sample.sum()), bits + sample.numel()
        if isinstance(getattr(module, "weight_scale", None), Tensor) and hasattr(module, "weight_format"):
            _fill_stored(module)
    return ones / max(bits, 1)


def _fill_stored(module: Any) -> None:
    """Quantize random weights into a layer, or into each of its experts, which all get the same weights."""
    stored, scale = module.weight, module.weight_scale
    chosen = get_format(module.weight_format)
    sizes = stored.shape[-2], stored.shape[-1] * chosen.packed
    generator = torch.Generator(stored.device).manual_seed(0)
    drawn = torch.empty(sizes, device=stored.device).uniform_(-WEIGHT_RANGE, WEIGHT_RANGE, generator=generator)
    weight, scales = chosen.quantize(drawn)
    assert scales is not None
    stored.copy_(weight.expand_as(stored))
    scale.copy_(scales.expand_as(scale))


# --- Work -------------------------------------------------------------------------------------------------------------


def random_prompts(lengths: Sequence[int]) -> list[dict[str, list[int]]]:
    """Prompts of these lengths, of random tokens; the same ones in each call."""
    draw = random.Random(0)
    return [{"prompt_token_ids": [draw.randrange(1, VOCABULARY) for _ in range(length)]} for length in lengths]


def mixed_load() -> tuple[list[int], list[int]]:
    """The lengths of the prompts of the mixed load, and the numbers of new tokens."""
    draw = random.Random(1)
    return [draw.randint(*PROMPT_RANGE) for _ in range(REQUESTS)], [draw.randint(*NEW_RANGE) for _ in range(REQUESTS)]


def generate(llm: Any, prompts: Sequence[Any], new_tokens: int | Sequence[int]) -> tuple[float, set[int]]:
    """Generate as many tokens as asked for; return the microseconds, and the tokens that occurred.

    Tokens are sampled at temperature 1. With random weights, all are about equally probable, so that sequences and
    experts differ as in real use, while greedy sequences would soon repeat one token.
    """
    from vllm import SamplingParams

    counts = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else new_tokens
    sampling = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in counts]
    start = time.perf_counter()
    outputs = llm.generate(list(prompts), sampling, use_tqdm=False)
    elapsed = (time.perf_counter() - start) * 1e6
    tokens = [token for output in outputs for token in output.outputs[0].token_ids]
    if len(tokens) != sum(counts):
        raise ValueError(f"vLLM: got {len(tokens)} tokens, must be {sum(counts)}")
    return elapsed, set(tokens)


def time_decoding(llm: Any, sequences: int, rounds: int) -> list[float]:
    """The times of a step for this number of sequences, one for each round.

    It is the median time between the results of two steps, over the middle half of all steps: in the first ones, vLLM
    may still take in prompts, and in the last ones some sequences may have ended.

    Raises:
        ValueError: all tokens are the same, as they are if the logits are NaN.
    """
    prompts, engine = random_prompts([PROMPT] * sequences), llm.llm_engine
    generate(llm, prompts, 4)
    times, step = [], engine.step
    for _ in range(rounds):
        ends: list[float] = []

        def timed() -> Any:
            result = step()
            ends.append(time.perf_counter())  # noqa: B023 (called in this round only)
            return result

        with patch.object(engine, "step", timed):
            _, tokens = generate(llm, prompts, NEW_TOKENS)
        if len(tokens) < 2:
            raise ValueError(f"vLLM: got only the token {tokens}, as from logits that are NaN")
        middle = ends[len(ends) // 4 : len(ends) * 3 // 4]
        times.append(1e6 * statistics.median(after - before for before, after in pairwise(middle)))
    return times


def measure(llm: Any, sequences: Sequence[int], rounds: int) -> dict[str, list[float]]:
    """The times of all work: a step by the number of sequences, the prompts, and the mixed load."""
    found = {f"decode {count}": time_decoding(llm, count, rounds) for count in sequences}
    prompts = random_prompts([PROMPTS[1]] * PROMPTS[0])
    lengths, new_tokens = mixed_load()
    requests = random_prompts(lengths)
    calls: dict[str, Callable[[], float]] = {
        "prompts": lambda: generate(llm, prompts, 1)[0],
        "mixed": lambda: generate(llm, requests, new_tokens)[0],
    }
    counts = {"prompts": PROMPT_ROUNDS * rounds, "mixed": rounds}
    for name, call in calls.items():
        call()
        found[name] = [call() for _ in range(counts[name])]
    return found


# --- Profile ----------------------------------------------------------------------------------------------------------

PARTS = {
    "MGLU": r"mglu_",
    "attention": r"flash|fmha|attention|attn|reshape_and_cache|varlen",
    "experts": r"moe|count_and_sort|grouped|topk_softmax",
    "products": r"gemm|gemv|nvjet|cutlass|xmma|splitk|cublas",
    "sampling": r"softmax|argmax|exponential|distribution|multinomial|reduce_kernel|gumbel|sample",
    "copies": r"memcpy|memset",
    "norms, rotary embedding, activations": r"triton|norm|rotary|act_and_mul|quant|elementwise",
}
"""Part of a step -> the pattern of its kernels' names. The first pattern that is found counts."""
STEP = re.compile(r"execute_.*context_0\(.*generation_[1-9]")
"""What vLLM's profiler calls a step in which all sequences decode."""


def part_of(kernel: str) -> str:
    """The part of a step to which a kernel belongs, by its name."""
    return next((part for part, pattern in PARTS.items() if re.search(pattern, kernel, re.IGNORECASE)), "others")


def profiled(events: Sequence[dict[str, Any]], step: float) -> list[dict[str, Any]]:
    """The kernels of a trace, longest first: part, kernel, launches a step and microseconds a step.

    Args:
        events: the events of a trace of steps that decode.
        step: the microseconds of a step without the profiler, which slows down the host. The first line, `gaps`, is the
            part of this time in which no kernel runs.

    Raises:
        ValueError: the trace has no step or no kernel.
    """
    steps = sum(event.get("cat") == "user_annotation" and bool(STEP.match(event["name"])) for event in events)
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not steps or not kernels:
        raise ValueError(f"profile: got {steps} steps and {len(kernels)} kernels, must be at least one of each")
    times, launches, busy_until, busy = defaultdict[str, float](float), defaultdict[str, int](int), 0.0, 0.0
    for event in sorted(kernels, key=lambda event: event["ts"]):
        end = event["ts"] + event["dur"]
        busy += max(0.0, end - max(event["ts"], busy_until))
        busy_until = max(busy_until, end)
        times[event["name"]] += event["dur"]
        launches[event["name"]] += 1
    lines = [
        {"part": part_of(name), "kernel": name[:120], "launches": launches[name] / steps, "microseconds": time / steps}
        for name, time in sorted(times.items(), key=lambda item: -item[1])
    ]
    return [{"part": "gaps", "kernel": "", "launches": 0.0, "microseconds": step - busy / steps}, *lines]


def profile(llm: Any, sequences: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Time steps, and then profile `NEW_TOKENS` of them, as `profiled` describes them."""
    step = statistics.median(time_decoding(llm, sequences, rounds))
    llm.start_profile()
    generate(llm, random_prompts([PROMPT] * sequences), NEW_TOKENS)
    llm.stop_profile()
    (trace,) = folder.glob("*.json.gz")
    with gzip.open(trace, "rt") as file:
        return profiled(json.load(file)["traceEvents"], step)


def profiler(folder: str) -> dict[str, Any]:
    """The argument `profiler_config` of `LLM`. The first steps, with the prompts, are left out."""
    quiet = {"torch_profiler_with_stack": False, "torch_profiler_dump_cuda_time_total": False}
    return {"profiler": "torch", "torch_profiler_dir": folder, "delay_iterations": 8, "ignore_frontend": True, **quiet}


def main() -> None:
    """Start the engine that the file `sys.argv[1]` describes, and answer each line of the standard input."""
    from vllm import LLM

    spec = Spec(**json.loads(Path(sys.argv[1]).read_text()))

    def answer(found: dict[str, Any]) -> None:
        with Path(spec.answers).open("a") as file:
            file.write(json.dumps(found) + "\n")

    start = time.perf_counter()
    llm = LLM(spec.folder, **spec.engine, **({"profiler_config": profiler(spec.profile)} if spec.profile else {}))
    seconds = time.perf_counter() - start
    answer({"start": [seconds * 1e6], "ones": llm.apply_model(fill)[0]})
    for _ in sys.stdin:
        if spec.profile:
            answer({"profile": profile(llm, spec.sequences[0], spec.rounds, Path(spec.profile))})
        else:
            answer(measure(llm, spec.sequences, spec.rounds))
