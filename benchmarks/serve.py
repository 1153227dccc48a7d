"""Measures served models: vLLM with SwiGLU and with SwiMGLU, in bfloat16 and with weights in fp8, on one GPU.

    python -m benchmarks.serve --models llama-8b --out DIR --resume --seconds 560

Each start of vLLM has processes of its own and vLLM's defaults, except for the sizes in `engine.ENGINE`, which are the
same for every variant. The weights are random. A start measures

- decode: prompts of 16 tokens and then 128 steps, for each number of sequences; the time of a step is the time of the
  call without the time of a call for one token
- prompts: 8 prompts of 1024 tokens each, for which a step has room; vLLM may begin with those that arrive first
- mixed: 64 requests at once, with prompts of 128 to 1024 tokens and with 16 to 256 new tokens
- start: the call of `LLM`; `cached` if an earlier start of the variant has left its compiled code in `--cache`

Variants take turns: each is started once, then each once more in another order, and so on. A result is the median over
all starts. DIR/serve.csv is written after each start, so that a command that is stopped loses little, and the next one
goes on with `--resume`. No start begins that would probably not end within `--seconds`.

With 8B parameters, a start takes 50 to 85 s on a bare H200 and less later; measuring takes 20 to 30 s. One call of 10
minutes has time for two starts of four variants with `--at-once 4`: four engines then share the GPU. They start
together, and take turns to measure, while the others are idle. They slow down each other's start, which therefore has
no row. Without `--at-once`, ten minutes are enough for one start of each of four or five variants. Qwen3-30B-A3B has
memory for `--at-once 2`, and time for one start of four variants. Mixtral 8x7B in bfloat16 needs a GPU for itself.

`--profile` writes serve_profile.csv instead: the time of a step by kernel, for the first number of sequences. Its gaps
are the time of a step without the profiler in which no kernel runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.engine import ENGINE, NEW_TOKENS, PROMPT, PROMPTS, REQUESTS, Spec, mixed_load
from benchmarks.records import Row, environment, facts_to_resume, parser_of, read, version, write, write_table

ROOT = Path(__file__).parents[1]
SEQUENCES = (1, 8, 32, 128, 256)
ROUNDS = 3
"""Calls of each kind in a start."""
STARTS = 2
LIMIT = 240.0
"""Seconds that an engine may take to start, or to measure once, before it is ended."""
NOTED = r" took |finished in|init engine|Using .*(backend|kernel|configuration)"
GRACE = 15.0
"""Seconds in which an engine may end by itself."""
PROTOCOL = (
    f"vLLM's class LLM with dummy weights, random masks, {', '.join(f'{k}={v}' for k, v in ENGINE.items())}; tokens "
    f"sampled at temperature 1; decode: us a step, the median between the results of two steps in the middle half of "
    f"{NEW_TOKENS}, after prompts of {PROMPT} tokens; prompts: us for "
    f"{PROMPTS[0]} x {PROMPTS[1]} tokens; mixed: us for {REQUESTS} requests; wall-clock time of calls, median over all "
    "calls in all starts of an engine; a process for each start, variants in turns, other engines idle; fp8: "
    "quantization=fp8 of vLLM, where SwiMGLU has fp8_row; fp8_row: only the weight of MGLU, and down projections of "
    "experts"
)
ENVIRONMENT = {
    "VLLM_HOST_IP": "127.0.0.1",  # without a network, the processes of vLLM hang if it looks for an address
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # sends the function `fill` to the process that has the model
}


@dataclass(frozen=True)
class Model:
    """A model to serve.

    Attributes:
        name: its name in tables.
        kind: the model type in Transformers; with `mglu_` in front, the one of `mglu_ops.transformers`.
        architecture: the name of its class; with `MGLU` in front, the one of `mglu_ops.transformers`.
        sizes: arguments of its configuration.
        layers: number of layers to serve; None for all.
    """

    name: str
    kind: str
    architecture: str
    sizes: dict[str, Any] = field(hash=False)
    layers: int | None = None

    @property
    def title(self) -> str:
        """The name, with the number of layers if some are left out."""
        every = self.sizes["num_hidden_layers"]
        return self.name if self.layers in (None, every) else f"{self.name}, {self.layers} of {every} layers"

    @property
    def shape(self) -> tuple[int, int]:
        """The rows and columns of the weight of a feed-forward layer or an expert."""
        return self.sizes.get("moe_intermediate_size", self.sizes["intermediate_size"]), self.sizes["hidden_size"]


_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 2048}
_EXPERTS = {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True}
_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
_30B = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_key_value_heads": 4}
MODELS = {
    "llama-1b": Model("Llama-3.2 1B", "llama", "LlamaForCausalLM", {**_HEADS, **_1B, "vocab_size": 128256}),
    "llama-8b": Model("Llama-3.1 8B", "llama", "LlamaForCausalLM", {**_HEADS, **_8B, "vocab_size": 128256}),
    "qwen3-moe": Model(
        "Qwen3-30B-A3B",
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**_HEADS, **_EXPERTS, **_30B, "head_dim": 128, "num_local_experts": 128, "vocab_size": 151936},
    ),
    "mixtral": Model(
        "Mixtral 8x7B",
        "mixtral",
        "MixtralForCausalLM",
        {**_HEADS, **_8B, "num_experts_per_tok": 2, "num_local_experts": 8, "vocab_size": 32000},
    ),
}
"""Name of a model on the command line -> the model."""


@dataclass(frozen=True)
class Variant:
    """A form of a model.

    Attributes:
        name: its name in tables, without the number of masks.
        n_masks: number of masks; 0 for SwiGLU.
        weight_format: the format of the weight of MGLU, and of the down projections of experts.
        quantization: vLLM's quantization of the other layers.
        activation_format: the format to which these layers of MGLU round x; vLLM's fp8 always rounds x to fp8.
    """

    name: str
    n_masks: int = 0
    weight_format: str = "dense"
    quantization: str | None = None
    activation_format: str = "dense"


VARIANTS = {
    "swiglu": Variant("SwiGLU"),
    "mglu-1": Variant("SwiMGLU", 1),
    "mglu-4": Variant("SwiMGLU", 4),
    "swiglu-fp8": Variant("SwiGLU, fp8", quantization="fp8"),
    "mglu-1-fp8": Variant("SwiMGLU, fp8", 1, "fp8_row", "fp8"),
    "mglu-4-fp8": Variant("SwiMGLU, fp8", 4, "fp8_row", "fp8"),
    "mglu-1-fp8_token": Variant("SwiMGLU, fp8, x too", 1, "fp8_row", "fp8", "fp8_token"),
    "mglu-4-fp8_token": Variant("SwiMGLU, fp8, x too", 4, "fp8_row", "fp8", "fp8_token"),
    "mglu-1-fp8_row": Variant("SwiMGLU, fp8_row", 1, "fp8_row"),
    "mglu-4-fp8_row": Variant("SwiMGLU, fp8_row", 4, "fp8_row"),
}
DEFAULT_VARIANTS = [name for name in VARIANTS if not name.endswith("_row")]


def write_config(model: Model, variant: Variant, folder: Path) -> None:
    """Write the model's config.json, which is all that vLLM reads of a model with dummy weights."""
    import transformers

    import mglu_ops.transformers  # noqa: F401 (registers the configurations)

    own = {"n_masks": variant.n_masks, "learnable_masks": False} if variant.n_masks else {}
    kind, architecture = ("mglu_", "MGLU") if variant.n_masks else ("", "")
    config = transformers.AutoConfig.for_model(kind + model.kind, **model.sizes, **own)
    config.architectures = [architecture + model.architecture]
    if model.layers is not None:
        config.num_hidden_layers = model.layers
    if variant.weight_format != "dense":
        place = "mglu_quantization_config" if variant.quantization else "quantization_config"
        formats = {"weight_format": variant.weight_format, "activation_format": variant.activation_format}
        setattr(config, place, {"quant_method": "mglu", **formats})
    config.save_pretrained(folder)


# --- Engines ----------------------------------------------------------------------------------------------------------


class EngineError(RuntimeError):
    """An engine ended or was too slow; the message has the end of its log."""


class Engine:
    """A process that runs `engine.main`, and the processes that vLLM starts in it. `close` ends all of them.

    Args:
        spec: what to start and measure.
        folder: a folder of this engine alone, for its log and its answers.
        cache: folder of compiled code, of vLLM and of this package.
    """

    def __init__(self, spec: Spec, folder: Path, cache: Path) -> None:
        self.answers, self.log, self.read = Path(spec.answers), folder / "log", 0
        spec.save(folder / "spec.json")
        caches = {"VLLM_CACHE_ROOT": str(cache / "vllm"), "MGLU_CACHE_DIR": str(cache / "mglu")}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-c", "from benchmarks.engine import main; main()", str(folder / "spec.json")]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=folder,
                env={**ENVIRONMENT, **os.environ, **caches, "PYTHONPATH": path},
                preexec_fn=os.setpgrp,  # `close` ends the group
            )

    def ask(self) -> None:
        """Let the engine measure once; `answer` waits for the result."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # `answer` says why the process has ended
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any]:
        """Wait for the next answer.

        Raises:
            EngineError: the process has ended, or gave no answer within `seconds`.
        """
        end = time.monotonic() + seconds
        while True:
            is_over = self.process.poll() is not None  # asked first, so that the last answer of a process is found
            lines = self.answers.read_text().splitlines(keepends=True) if self.answers.is_file() else []
            if len(lines) > self.read and lines[self.read].endswith("\n"):
                self.read += 1
                found: dict[str, Any] = json.loads(lines[self.read - 1])
                return found
            if is_over or time.monotonic() > end:
                reason = f"ended with {self.process.returncode}" if is_over else f"gave no answer in {seconds:.0f} s"
                raise EngineError("\n".join([f"the engine {reason}", *self._errors(), self.log.read_text()[-1000:]]))
            time.sleep(0.1)

    def _errors(self) -> list[str]:
        """The lines of the log that name an error, first ones first: the engine's process tells the cause."""
        lines = self.log.read_text().splitlines()
        return list(dict.fromkeys(line[-300:] for line in lines if re.search(r"\w(Error|Exception): ", line)))[:8]

    def notes(self) -> list[str]:
        """The lines of the log that tell what the start took, and which kernels vLLM chose."""
        return [line[-200:] for line in self.log.read_text().splitlines() if re.search(NOTED, line)]

    def finish(self) -> None:
        """Let the engine end by itself."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()  # ends the engine's loop over the standard input

    def close(self) -> None:
        """End all processes of the engine."""
        self.finish()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass(frozen=True)
class Start:
    """A start of a variant of a model; `index` counts the starts of the variant from 0."""

    model: Model
    variant: Variant
    index: int = 0

    def __str__(self) -> str:
        return f"{self.model.title}, {self.variant.name}, n_m={self.variant.n_masks}, start {self.index + 1}"

    @property
    def slug(self) -> str:
        """A name of the variant for a folder."""
        return re.sub(r"\W+", "_", f"{self.model.title}_{self.variant.name}_{self.variant.n_masks}")

    def is_in(self, rows: Sequence[Row], sequences: Sequence[int]) -> bool:
        """True if the rows of all work have the times of this start."""
        done = {row.key for row in rows if len(times_of(row)) > self.index}
        names = [*(f"decode {count}" for count in sequences), "prompts", "mixed"]
        return all(self.row(name, []).key in done for name in names)

    def row(self, name: str, starts: list[list[float]]) -> Row:
        """A row from the times of each start; `name` is a name of `engine.measure`, or `start`."""
        work, _, sequences = name.partition(" ")
        tokens = {"prompts": PROMPTS[0] * PROMPTS[1], "mixed": sum(mixed_load()[1])}.get(work, int(sequences or 1))
        extra: dict[str, object] = {"model": self.model.title, "work": work, "times": starts}
        case, times = f"{self.model.title}, {work}", [*chain(*starts)]
        variant = self.variant
        return Row.of_times(case, variant.name, tokens, self.model.shape, variant.n_masks, times, extra=extra)


def times_of(row: Row) -> list[list[float]]:
    """The times of each start, of which the row has the median."""
    starts: Any = row.extra["times"]
    return starts


def merged(rows: Sequence[Row], start: Start, answer: dict[str, list[float]]) -> list[Row]:
    """The rows with the times of one more start."""
    by_key = {row.key: row for row in rows}
    for name, times in answer.items():
        key = start.row(name, []).key
        earlier = times_of(by_key[key]) if key in by_key else []
        by_key[key] = start.row(name, [*earlier, [float(f"{time:.6g}") for time in times]])
    return list(by_key.values())


class Session:
    """A command that starts engines, one group after the other.

    Attributes:
        options: the options of the command line.
        failed: the number of engines that failed.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.begin, self.longest, self.failed = options, time.monotonic(), 0.0, 0

    def groups(self, rows: Sequence[Row]) -> Iterator[list[Start]]:
        """The starts that the rows lack, in groups that share the GPU, while there is time for them."""
        given = self.options
        for model, index in ((model, index) for model in given.models for index in range(given.starts)):
            names = list(given.variants)
            if index:
                random.Random(index).shuffle(names)
            served = MODELS[model] if given.layers is None else replace(MODELS[model], layers=given.layers)
            missing = [Start(served, VARIANTS[name], index) for name in names]
            missing = [start for start in missing if not start.is_in(rows, given.sequences)]
            for first in range(0, len(missing), given.at_once):
                group = missing[first : first + given.at_once]
                elapsed = time.monotonic() - self.begin
                if elapsed + self.longest > given.seconds:
                    print(f"{elapsed:.0f} s have passed: left out: {', '.join(map(str, group))}", flush=True)
                    continue
                begin = time.monotonic()
                yield group
                self.longest = max(self.longest, time.monotonic() - begin)

    def answers(self, group: Sequence[Start]) -> Iterator[tuple[Start, dict[str, Any]]]:
        """Start the engines of a group together, and let each measure while the others wait. Print failures."""
        given = self.options
        with ExitStack() as stack:
            engines = {}
            for start in group:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mglu_serve_")))
                engines[start] = Engine(self._spec(start, folder), folder, given.cache)
                stack.callback(engines[start].close)
            for is_measured in (False, True):
                for start, engine in list(engines.items()):
                    try:
                        if is_measured:
                            engine.ask()
                        found = engine.answer(min(given.limit, given.seconds - (time.monotonic() - self.begin)))
                    except EngineError as error:
                        print(f"{start}: {error}", flush=True)
                        self.failed += 1
                        del engines[start]
                    else:
                        if not is_measured:
                            print(f"{start}: started", *engine.notes(), sep="\n    ", flush=True)
                        yield start, found
            for engine in engines.values():  # they end side by side
                engine.finish()

    def _spec(self, start: Start, folder: Path) -> Spec:
        given = self.options
        model = given.cache / "models" / start.slug  # in the same place in each start: vLLM's cache depends on the path
        write_config(start.model, start.variant, model)
        profile = folder / "profile"
        profile.mkdir()
        return Spec(
            folder=str(model),
            engine={**ENGINE, "quantization": start.variant.quantization, **given.engine},
            sequences=given.sequences,
            rounds=given.rounds,
            answers=str(folder / "answers"),
            profile=str(profile) if given.profile else "",
        )

    def measure(self) -> list[Row]:
        """Measure what `serve.csv` lacks, and write it after each answer."""
        given, facts = self.options, facts_of_serving()
        rows = read(given.out, "serve") if given.resume else []
        if rows:
            facts = facts_to_resume(given.out, "serve", facts)
        for group in self.groups(rows):
            for start, answer in self.answers(group):
                if "start" in answer:
                    print(f"{start}: in {answer['start'][0] / 1e6:.0f} s", flush=True)
                    timed = {self._name_of_start(start): answer["start"]}
                    answer = timed if len(group) == 1 else {}  # engines that start together slow each other down
                rows = merged(rows, start, answer)
                if rows:
                    write(rows, given.out, "serve", facts)
                print(*(start.row(name, [times]) for name, times in answer.items()), sep="\n", flush=True)
        return rows

    def _name_of_start(self, start: Start) -> str:
        """`start`, or `start_cached` if an earlier start of the variant has left its compiled code in the cache."""
        mark = self.options.cache / "models" / start.slug / "started"
        name = "start_cached" if mark.exists() else "start"
        mark.touch()
        return name

    def profile(self) -> list[dict[str, Any]]:
        """Profile the first number of sequences of each variant, and write `serve_profile.csv`."""
        given, lines = self.options, []
        for group in self.groups([]):
            for start, answer in self.answers(group):
                about = {"model": start.model.title, "variant": start.variant.name, "n_masks": start.variant.n_masks}
                about["sequences"] = given.sequences[0]
                lines += [{**about, **line} for line in answer.get("profile", ())]
                if lines:
                    write_table(lines, facts_of_serving(), given.out, "serve_profile")
        return lines


def facts_of_serving() -> dict[str, str]:
    """The facts at the head of the results, with the version of vLLM."""
    return {**environment(PROTOCOL), "vllm": version("vllm"), "transformers": version("transformers")}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__ or "", resume=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=DEFAULT_VARIANTS, metavar="VARIANT")
    parser.add_argument("--sequences", nargs="+", type=int, default=list(SEQUENCES), metavar="N")
    parser.add_argument("--layers", type=int, help="serve only so many layers of each model")
    parser.add_argument("--starts", type=int, default=STARTS, help="starts of each variant")
    parser.add_argument("--at-once", type=int, default=1, help="engines that share the GPU and take turns")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="calls of each kind in a start")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time of the whole command")
    parser.add_argument("--limit", type=float, default=LIMIT, help="time of a start, and of its measurement")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "mglu_serve_cache")
    parser.add_argument("--engine", type=json.loads, default={}, help="arguments of LLM as JSON, for all variants")
    parser.add_argument("--profile", action="store_true", help="profile a step in place of measuring")
    options = parser.parse_args(arguments)
    options.cache.mkdir(parents=True, exist_ok=True)
    return options


def run(out: Path, resume: bool = False, *arguments: str) -> list[Row]:
    """Measure `serve.csv`. `arguments` are options of the command."""
    return Session(parse(["--out", str(out), *(["--resume"] if resume else []), *arguments])).measure()


def check(out: Path) -> list[Row]:
    """Serve a small model once, with and without masks. This shows that everything works; the times mean little."""
    small = "--models llama-1b --layers 2 --variants swiglu mglu-1 --sequences 1 8 --starts 1 --rounds 1"
    return run(out, False, *small.split())


def main() -> int:
    """Run the command. Returns 1 if an engine failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as `timeout` sends; engines are then ended too
    session = Session(parse())
    if session.options.profile:
        session.profile()
    else:
        session.measure()
    return int(session.failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
