"""Dependent launch on a GPU: compiled models use it only in CUDA graphs, and their results stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import mglu_ops
from mglu_ops.nn import NaiveMGLU

pytest.importorskip("triton", reason="triton is not installed")

pytestmark = pytest.mark.gpu

HIDDEN, INTERMEDIATE, LAYERS, SLOTS, REPLAYS = 1024, 2048, 6, 16, 50
WAIT, LET_GO = "gdc_wait()", "gdc_launch_dependents()"


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs a GPU of compute capability 9.0 or later")
    torch._dynamo.reset()
    # Turn off deterministic algorithms, with which torch would fill new memory and call a library for `index_put_`.
    torch.use_deterministic_algorithms(False)
    with inductor_config.patch({"fx_graph_cache": False}):
        yield
    torch._dynamo.reset()


class Layer(nn.Module):
    """A feed-forward layer with RMS norm and residual, which also writes its inputs to a cache and reads the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.mglu = NaiveMGLU(HIDDEN, INTERMEDIATE, n_masks=2)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
        self.cache: Tensor
        self.register_buffer("cache", torch.zeros(SLOTS, HIDDEN))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.cache.index_copy_(0, position, x[:1])
        seen = torch.arange(SLOTS, device=x.device) <= position
        history = (self.cache * seen[:, None]).sum(0, dtype=torch.float32).to(x.dtype)
        return x + self.down(self.mglu(self.norm(x + history)))


class Model(nn.Module):
    """Layers as in decoding, where kernels of Inductor, of the operator and of a library follow each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, position)
        return x


def model_of(form: str) -> Model:
    torch.manual_seed(0)
    model = Model().cuda().bfloat16().eval().requires_grad_(False)
    if form == "packed":
        mglu_ops.freeze(model)
    return model


def outputs(form: str, *, dependent_launch: bool, mode: str | None = "reduce-overhead") -> tuple[list[Tensor], str]:
    """Return the results of successive calls, each of which depends on the caches of the calls before, and the code."""
    torch._dynamo.reset()
    model = model_of(form)
    compiled: Any = torch.compile(model, mode=mode)
    inputs = torch.randn(REPLAYS, 2, HIDDEN, generator=torch.Generator().manual_seed(1)).cuda().bfloat16()
    positions = [torch.tensor([step % SLOTS], device="cuda") for step in range(REPLAYS)]
    results, code = [], ""
    with torch.no_grad(), mglu_ops.fusion(dependent_launch=dependent_launch):
        for x, position in zip(inputs, positions, strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            if results:
                result = compiled(x, position)
            else:
                result, modules = run_and_get_code(compiled, x, position)
                code = "".join(modules)
            results.append(result.clone())
    assert "mglu.forward" in code
    return results, code


@pytest.mark.parametrize("form", ["packed", "naive"])
def test_results_are_the_same_bit_by_bit(form: str) -> None:
    results, code = outputs(form, dependent_launch=True)
    expected, without = outputs(form, dependent_launch=False)
    assert WAIT in code
    assert LET_GO in code
    assert WAIT not in without
    assert [step for step, pair in enumerate(zip(results, expected, strict=True)) if not torch.equal(*pair)] == []


def test_replays_are_the_same_bit_by_bit() -> None:
    """Replay one graph with the same inputs: each replay writes the same cache, and a race would show in some."""
    model = model_of("packed")
    compiled: Any = torch.compile(model, mode="reduce-overhead")
    x, position = torch.randn(2, HIDDEN, device="cuda").bfloat16(), torch.tensor([3], device="cuda")
    results = []
    with torch.no_grad(), mglu_ops.fusion():
        for _ in range(REPLAYS + 3):  # the first calls warm up and record
            torch.compiler.cudagraph_mark_step_begin()
            results.append(compiled(x, position).clone())
    assert all(torch.equal(result, results[0]) for result in results)


def test_no_dependent_launch_without_cuda_graphs() -> None:
    code = outputs("packed", dependent_launch=True, mode=None)[1]
    assert WAIT not in code
    assert LET_GO not in code


def test_no_dependent_launch_without_mglu_layers() -> None:
    model = nn.Sequential(nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)).cuda().bfloat16().requires_grad_(False)
    x = torch.randn(2, HIDDEN, device="cuda").bfloat16()
    with mglu_ops.fusion():
        _, (code,) = run_and_get_code(torch.compile(model, mode="reduce-overhead"), x)
    assert WAIT not in code
