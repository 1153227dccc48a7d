"""DistributedDataParallel: Dynamo splits graphs between buckets, and the report says so in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

import mglu_ops
from compile_passes.report import SPLIT_BY_DDP, FusionReport
from mglu_ops.nn import MGLU
from tests.support.budgets import BUDGET, relative_error
from tests.support.programs.compiled import OfSource, parameter
from tests.support.programs.graphs import Capture
from tests.support.programs.spellings import term_of_products, term_of_weights

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo"),
]

SAME = 8 * BUDGET[torch.float32]
SIZE = 32
BYTES = 4 * SIZE * SIZE
"""The bytes of a weight, and of one mask's logits."""


@pytest.fixture(autouse=True)
def _one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    dist.destroy_process_group()


Spelling = Callable[[Tensor, Tensor, Tensor], Tensor]
SPELLINGS: dict[str, Spelling] = {
    "product": lambda x, w, m: term_of_products(F.linear(x, w * m), F.linear(x, w * (1 - m))),
    "difference": lambda x, w, m: term_of_products(F.linear(x, masked := w * m), F.linear(x, w - masked)),
    "weights first": lambda x, w, m: term_of_weights(x, masked := w * m, w - masked),
    "transposed": lambda x, w, m: term_of_products(x @ (w * m).T, x @ (w * (1 - m)).T),
    "product of transposes": lambda x, w, m: term_of_products(x @ (w.t() * m.t()), x @ (w.t() * (1 - m.t()))),
}


class Layer(nn.Module):
    """MGLU with trained masks, or with a bool buffer as the mask."""

    def __init__(self, spelling: str = "product", learned: bool = True, n_masks: int = 1) -> None:
        super().__init__()
        self.spelling = SPELLINGS[spelling]
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / SIZE**0.5)
        tensor = torch.randn(n_masks, SIZE, SIZE)
        if learned:
            self.logits = nn.Parameter(tensor)
        else:
            self.register_buffer("masks", tensor > 0)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "logits"):
            return sum(self.spelling(x, self.weight, mask.to(x.dtype)) for mask in self.masks)
        hard = [((soft > 0).to(x.dtype) - soft).detach() + soft for soft in self.logits]
        return sum(self.spelling(x, self.weight, mask) for mask in hard)


class Model(nn.Module):
    """Blocks with residual connections, which Dynamo captures in one graph without DDP."""

    def __init__(self, *blocks: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Identity() if head is None else head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _report(
    monkeypatch: pytest.MonkeyPatch,
    model: nn.Module,
    bucket_bytes: int,
    *,
    first_bucket_bytes: int | None = None,
    optimise: bool = True,
    through_inductor: bool = False,
    assume_binary: bool = False,
) -> FusionReport:
    """The report of a training step under DDP. The step must have eager's results and gradients."""
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", min(bucket_bytes, first_bucket_bytes or bucket_bytes))
    x = torch.randn(6, SIZE)
    expected = model(x)
    wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_bytes / 2**20)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp=optimise):
        if through_inductor:
            with mglu_ops.fusion() as report, inductor_config.patch(force_disable_caches=True):
                result = torch.compile(ddp)(x)
        else:
            capture = Capture(assume_binary=assume_binary)
            result, report = torch.compile(ddp, backend=capture)(x), capture.report
        result.square().sum().backward()
    assert relative_error(result, expected) <= SAME
    for (name, trained), want in zip(model.named_parameters(), wanted, strict=True):
        assert trained.grad is not None
        assert relative_error(trained.grad, want) <= SAME, name
    return report


@pytest.mark.long
@pytest.mark.parametrize(
    ("spelling", "learned", "n_masks"),
    [
        (spelling, learned, 1 + (number + learned) % 2)
        for number, spelling in enumerate(("product", "difference", "transposed", "weights first"))
        for learned in (True, False)
    ],
)
def test_layer_is_fused_or_its_split_is_reported(
    monkeypatch: pytest.MonkeyPatch, spelling: str, learned: bool, n_masks: int
) -> None:
    """The size of a bucket, here 1 to 7 weights, decides at which node Dynamo splits the graph."""
    for weights in range(1, 8):
        model = Model(*(Layer(spelling, learned, n_masks) for _ in range(2)))
        report = _report(monkeypatch, model, weights * BYTES)
        for block in ("blocks.0", "blocks.1"):
            fused = [site.n_masks for site in report.fused if site.module_path == block]
            assert sum(fused) == n_masks or SPLIT_BY_DDP in str(report), f"{block}, {weights}: {report}"


@pytest.mark.parametrize("assume_binary", [False, True])
@pytest.mark.parametrize("spelling", ["product", "product of transposes"])
def test_layer_whose_mask_comes_from_another_part(
    monkeypatch: pytest.MonkeyPatch, spelling: str, assume_binary: bool
) -> None:
    """Gate and value are in one part of the graph, and the mask is an input of this part."""
    report = _report(monkeypatch, Model(Layer(spelling)), 2 * BYTES, assume_binary=assume_binary)
    assert (len(report.fused), len(report.missed)) == (0, 1)
    assert SPLIT_BY_DDP in str(report)


@pytest.mark.long
def test_advice_of_the_report_lets_all_layers_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "torch._dynamo.config.optimize_ddp = False" in SPLIT_BY_DDP
    for optimise in (True, False):
        model = Model(*(Layer() for _ in range(2)))
        report = _report(monkeypatch, model, 2 * BYTES, optimise=optimise)
        assert [site.operator for site in report.fused] == ([] if optimise else ["forward_ste"] * 2)
        assert bool(report.missed) is report.is_split is optimise
        assert (SPLIT_BY_DDP in str(report)) is optimise


@pytest.mark.long
def test_other_reasons_are_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer has a float mask, and is in the body of a higher-order operator, which is a separate graph."""
    mask = (torch.randn(SIZE, SIZE) > 0).float()
    checkpointed = OfSource("checkpoint(gated, x, w, m)", w=parameter(SIZE, SIZE), m=mask)
    report = _report(monkeypatch, Model(checkpointed, Layer()), BYTES)
    reasons = [site.reason or "" for site in report.missed]
    assert "make it bool" in reasons[0]
    assert SPLIT_BY_DDP in str(report)


@pytest.mark.long
def test_module_of_mglu_ops_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "mglu_ops.nn.MGLU" in SPLIT_BY_DDP
    model = Model(*(MGLU(SIZE, SIZE, n_masks=2) for _ in range(3)))
    report = _report(monkeypatch, model, BYTES, through_inductor=True)
    assert (report.fused, report.missed, report.graphs) == ([], [], 3)


@pytest.mark.long
def test_layers_between_the_splits_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head fills the first bucket, and the layers are in the second."""
    head = nn.Linear(SIZE, 2 * SIZE, bias=False)
    model = Model(*(Layer() for _ in range(2)), head=head)
    report = _report(monkeypatch, model, 100 * BYTES, first_bucket_bytes=2 * BYTES)
    assert (len(report.fused), len(report.missed), report.graphs) == (2, 0, 2)


def tied() -> OfSource:
    """A model without an MGLU layer, which multiplies one weight by x elementwise and uses it in two products."""
    weight = nn.Parameter(torch.randn(6, SIZE) / SIZE**0.5)
    return OfSource("linear(x * w, v, b) @ w.t() @ w", w=weight, v=parameter(SIZE, SIZE), b=parameter(SIZE))


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [
        lambda: prune.random_unstructured(nn.Linear(SIZE, SIZE), "weight", 0.5),
        tied,
        lambda: nn.Linear(SIZE, SIZE),
    ],
    ids=["pruned", "tied", "linear"],
)
def test_split_of_an_ordinary_model_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module]
) -> None:
    report = _report(monkeypatch, Model(make(), make(), make()), BYTES)
    assert report.graphs > 1
    assert (report.fused, report.missed) == ([], [])
