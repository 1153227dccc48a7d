"""The stages of the demo, from text to table. A stage that finds a disagreement raises `Disagreement`."""

from __future__ import annotations

import json
import math
import time
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import mglu_ops
import mglu_ops.nn

from ..accuracy import ERROR_BUDGET, relative_error
from ..words import counted
from . import agreement, text
from .errors import Disagreement, require
from .export import check_package, export, package_folder
from .generate import PROMPT, generate
from .model import LanguageModel, gated_projections
from .real_size import describe, time_layer
from .settings import Settings
from .table import Row, render
from .timing import COMPILED, FUSED, NAIVE, PACKAGE, SWIGLU, compiled, time_steps, time_token
from .train import Forward, perplexity, train

GENERATED = 240
FAILED = "FAILED"


@dataclass
class Demo:
    """The inputs of a run, and the results of its stages so far; `--json` writes `results`."""

    settings: Settings
    corpus: text.Corpus
    naive: nn.Module
    swiglu: nn.Module
    results: dict[str, Any] = field(default_factory=dict)
    export_failure: str | None = None
    start: float = field(default_factory=time.perf_counter)

    def say(self, words: str) -> None:
        """Announce a stage, with the seconds since the start."""
        print(f"[{time.perf_counter() - self.start:5.0f} s] {words}", flush=True)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return the batch that comparisons and timings share."""
        sizes, device = self.settings.sizes, self.settings.device
        (pair,) = self.corpus.train_batches(sizes.batch, sizes.context, 1, self.settings.seed + 1)
        return pair[0].to(device), pair[1].to(device)


def run_demo(settings: Settings) -> dict[str, Any]:
    """Run every stage and print the tables.

    Returns:
        The results, as `--json` writes them.

    Raises:
        UserError: the text cannot be used.
        Disagreement: two results that must agree do not, or a model did not learn.
    """
    start = time.perf_counter()
    demo = _begin(settings)
    demo.start = start
    demo.say(_describe(demo))
    fused = _fuse_and_train(demo)
    frozen = _evaluate(demo, fused)
    deployed = {name: _deployed(model, settings) for name, model in _named(demo, frozen).items()}
    with package_folder() as folder:
        package = _deploy(demo, deployed[FUSED], folder)
        _time(demo, deployed, package)
        del package  # closes its files before their folder is removed
    print("\n" + _table(demo.results) + "\n", flush=True)
    require(demo.export_failure is None, f"{demo.export_failure}")
    _time_real_size(demo)
    demo.results["seconds"] = time.perf_counter() - demo.start
    print(f"\nEverything agrees. {demo.results['seconds']:.0f} s in all.", flush=True)
    if settings.json is not None:
        settings.json.write_text(json.dumps(demo.results, indent=2) + "\n")
    return demo.results


def _begin(settings: Settings) -> Demo:
    corpus = text.load(settings.text, settings.sizes.context)

    def build(gated: Any) -> nn.Module:
        torch.manual_seed(settings.seed)
        return LanguageModel(settings.sizes, gated).to(settings.device)

    return Demo(
        settings,
        corpus,
        naive=build(lambda inputs, outputs: mglu_ops.nn.NaiveMGLU(inputs, outputs, n_masks=settings.n_masks)),
        swiglu=build(lambda inputs, outputs: mglu_ops.nn.GLU(inputs, outputs, activation="silu")),
    )


def _describe(demo: Demo) -> str:
    sizes, settings = demo.settings.sizes, demo.settings
    demo.results["settings"] = {
        **asdict(sizes),
        "n_masks": settings.n_masks,
        "device": str(settings.device),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "seed": settings.seed,
        "text": demo.corpus.name,
    }
    return (
        f"{demo.corpus.name}: {len(demo.corpus.train):,} bytes to train, {len(demo.corpus.held_out):,} held out; "
        f"{counted(sizes.layers, 'layer')}, width {sizes.width}, feed-forward {sizes.hidden}, "
        f"{counted(settings.n_masks, 'mask')}; "
        f"{sizes.batch} x {sizes.context} bytes per step; {settings.device}, {demo.results['settings']['dtype']}"
    )


def _fuse_and_train(demo: Demo) -> Forward:
    """Compile the naive model with fusion on, check what was fused and that it agrees, then train it and SwiGLU."""
    settings = demo.settings
    demo.say("compiling the naive model with fusion on, and comparing it with the same model uncompiled")
    with mglu_ops.fusion() as report:
        fused = compiled(demo.naive)
        _agree(demo, fused, "before training")
        _check_sites(demo, report)
        demo.say(f"{len(report.fused)} of {settings.sizes.layers} layers fused, none missed; training both models")
        trained = train("MGLU, fused", demo.naive, fused, demo.corpus, settings)
    baseline = train("SwiGLU", demo.swiglu, compiled(demo.swiglu), demo.corpus, settings)
    demo.results["training"] = {FUSED: asdict(trained), SWIGLU: asdict(baseline)}
    return fused


def _agree(demo: Demo, fused: Forward, when: str) -> None:
    found = agreement.compare(demo.naive, fused, *demo.batch(), demo.settings)
    demo.results.setdefault("agreement", {})[when] = asdict(found)
    agreement.check(found, demo.settings.dtype, when)


def _check_sites(demo: Demo, report: Any) -> None:
    layers = demo.settings.sizes.layers
    missed = [f"{site.module_path}: {site.reason}" for site in report.missed]
    demo.results["sites"] = {"layers": layers, "fused": len(report.fused), "missed": len(missed)}
    require(not missed, "the pass missed " + "; ".join(missed))
    require(len(report.fused) == layers, f"the pass fused {len(report.fused)} layers of {layers}")
    masks = sorted({site.n_masks for site in report.fused})
    require(masks == [demo.settings.n_masks], f"the fused layers have {masks} masks, not {demo.settings.n_masks}")


def _evaluate(demo: Demo, fused: Forward) -> nn.Module:
    """Check agreement and perplexities after training, and that freezing changes neither.

    Returns:
        The frozen model.
    """
    settings, corpus = demo.settings, demo.corpus
    demo.say("comparing again after training, measuring perplexity on the held-out text, freezing")
    _agree(demo, fused, "after training")
    frozen = mglu_ops.freeze(deepcopy(demo.naive))
    inputs, _ = demo.batch()
    with torch.no_grad(), settings.autocast():
        error = relative_error(frozen(inputs), demo.naive(inputs))
    demo.results["agreement"]["frozen"] = error
    budget = ERROR_BUDGET[settings.dtype]
    require(error <= budget, f"freezing changed the outputs by {error:.2e}; the budget is {budget:.0e}")
    models = {NAIVE: demo.naive, FUSED: frozen, SWIGLU: demo.swiglu}
    found = {name: perplexity(model, corpus, settings) for name, model in models.items()}
    found["unigram"] = corpus.unigram_perplexity()
    demo.results["perplexity"] = found
    check_perplexity(found, budget)
    return frozen


def check_perplexity(found: dict[str, float], budget: float) -> None:
    """Check that every model beats the byte frequencies, and that freezing kept the perplexity.

    Raises:
        Disagreement: with the numbers.
    """
    for name in (NAIVE, FUSED, SWIGLU):
        require(
            found[name] < found["unigram"],
            f"perplexity of {name} is {found[name]:.3f}, not below {found['unigram']:.3f}, that of byte frequencies",
        )
    change = abs(found[FUSED] / found[NAIVE] - 1)
    require(change <= budget, f"freezing changed the perplexity by {change:.2e}; the budget is {budget:.0e}")


def _named(demo: Demo, frozen: nn.Module) -> dict[str, nn.Module]:
    return {NAIVE: demo.naive, FUSED: frozen, SWIGLU: demo.swiglu}


def _deployed(model: nn.Module, settings: Settings) -> nn.Module:
    """Return a copy of `model` for inference, in the dtype of the matrix products."""
    return deepcopy(model).to(settings.dtype).eval().requires_grad_(False)


def _deploy(demo: Demo, frozen: nn.Module, folder: str) -> Forward | None:
    """Generate text, export the frozen model, load the package back and check it.

    Returns:
        The package, or None if it is wrong. The demo then fails only after it has printed the table, which does not
        need the package.
    """
    settings = demo.settings
    content = generate(frozen, GENERATED, settings.sizes.context, settings.device, settings.seed)
    demo.results["generated"] = text.printable(content)
    demo.say(f"the frozen model writes, after {text.printable(PROMPT)!r}:")
    print("\n".join("          | " + line for line in demo.results["generated"].splitlines()), flush=True)
    demo.say("exporting the frozen model with AOTInductor, and loading the package back")
    try:
        package = export(frozen, settings, folder)
        demo.results["agreement"]["exported"] = check_package(package, frozen, demo.corpus, settings)
    except Disagreement as failure:
        demo.export_failure = str(failure)
        return None
    return package


def _time(demo: Demo, deployed: dict[str, nn.Module], package: Forward | None) -> None:
    """Measure the bytes of the layers, and the times of a training step and of a token."""
    demo.results["bytes"] = {name: _bytes(model) for name, model in deployed.items()}
    demo.say("timing training steps (compiles the naive model without fusion)")
    steps = time_steps(demo.naive, demo.swiglu, demo.batch(), demo.settings)
    torch._dynamo.reset()  # so that no variant of a token reuses code compiled for a training step
    demo.say("timing one token (compiles three models)")
    token = demo.batch()[0][:1, :1].contiguous()
    times = time_token(deployed, package, token, demo.settings)
    exported = times.pop(PACKAGE, None)
    demo.results["milliseconds"] = {"step": steps, "token": times, "token_exported": exported}


def _time_real_size(demo: Demo) -> None:
    out_features, in_features = demo.settings.layer
    demo.say(f"timing one layer of {out_features} x {in_features}, the size of a real model (compiles three variants)")
    found = time_layer(demo.settings)
    if isinstance(found, str):
        demo.say(f"skipped this layer: {found}")
        return
    demo.results["real_size"] = found
    print("\n" + describe(found), flush=True)


def _bytes(model: nn.Module) -> dict[str, int]:
    """Count the bytes of the weights and of the masks (or their logits) in the gated projections."""
    sizes = {"weights": 0, "masks": 0}
    for module in gated_projections(model):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            sizes["masks" if "mask" in name else "weights"] += tensor.numel() * tensor.element_size()
    return sizes


def _table(results: dict[str, Any]) -> str:
    found, compared = results["perplexity"], results["agreement"]
    trained, sizes = compared["after training"], results["bytes"]
    learned = {name: found[name] for name in (NAIVE, FUSED, SWIGLU)}
    times = results["milliseconds"]
    rows = [
        Row("layers fused", {FUSED: f"{results['sites']['fused']} of {results['sites']['layers']}"}),
        Row("output error, fused against naive", {FUSED: trained["output"]}, "{:.1e}"),
        Row("gradient error, worst parameter", {FUSED: trained["gradient"]}, "{:.1e}"),
        Row("output error against float64", {NAIVE: trained["naive_output"], FUSED: trained["fused_output"]}, "{:.1e}"),
        Row(
            "gradient error against float64",
            {NAIVE: trained["naive_gradient"], FUSED: trained["fused_gradient"]},
            "{:.1e}",
        ),
        Row("output error, frozen against naive", {FUSED: compared["frozen"]}, "{:.1e}"),
        Row("output error, exported against frozen", {FUSED: compared.get("exported", FAILED)}, "{:.1e}"),
        Row(f"held-out perplexity per byte (unigram {found['unigram']:.2f})", learned, "{:.3f}"),
        Row("bits per byte", {name: math.log2(value) for name, value in learned.items()}, "{:.3f}"),
        *(
            Row(f"bytes of {part}, gated projections", _by_column(sizes, part), "{:,}", ratio=True)
            for part in ("weights", "masks")
        ),
        Row("ms per training step", times["step"], "{:.1f}", ratio=True),
        Row("ms per token (one token, no cache; fused: frozen)", times["token"], "{:.3f}", ratio=True),
        Row("ms per token, exported package", {FUSED: times["token_exported"] or FAILED}, "{:.3f}"),
    ]
    return render(rows)


def _by_column(sizes: dict[str, dict[str, int]], part: str) -> dict[str, float | str]:
    values: dict[str, float | str] = {name: size[part] for name, size in sizes.items()}
    values[COMPILED] = values[NAIVE]
    return values
