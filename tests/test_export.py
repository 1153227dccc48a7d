"""Exported programs are fused with their masks packed, and packages of them do what the model does."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from runtime_fixtures import inputs, model
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import mglu_ops
from compile_passes.exported import fuse_exported, layers_of
from compile_passes.fusion import FusionError
from compile_passes.report import FusionReport
from mglu_ops.nn import MGLU, NaiveMGLU
from mglu_ops.runtime.package import read_info

pytest_plugins = ["runtime_fixtures"]


def export(module: nn.Module, *example: Tensor, grad: bool = False) -> ExportedProgram:
    with torch.set_grad_enabled(grad):
        return torch.export.export(module, example, dynamic_shapes=tuple({0: Dim.AUTO} for _ in example))


def operators(program: ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if str(node.target).startswith("mglu")]


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


# --- Fusing exported programs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("cls", [NaiveMGLU, MGLU])
@pytest.mark.parametrize("learnable", [True, False], ids=["learned", "fixed"])
def test_masks_are_packed_and_logits_gone(cls: type, learnable: bool, grad: bool) -> None:
    torch.manual_seed(0)
    layer = cls(45, 24, n_masks=3, learnable_masks=learnable)
    module = nn.Sequential(nn.Linear(20, 45), layer)
    program = export(module, torch.randn(5, 20), grad=grad)
    before = str(program.graph), set(program.state_dict)
    fused = fuse_exported(program, strict=True)
    assert (str(program.graph), set(program.state_dict)) == before, "the given program changed"
    assert operators(fused) == ["mglu.forward.default"]
    assert set(fused.state_dict) == {"0.weight", "0.bias", "1.weight", "1.packed_masks"}
    packed = layer.packed_masks if layer.packed_masks is not None else torch.ops.mglu.pack_masks(layer.mask_logits > 0)
    assert torch.equal(fused.state_dict["1.packed_masks"], packed)
    again = saved_and_loaded(fused)
    for tokens in (2, 5, 64):
        x = torch.randn(tokens, 20)
        expected = module(x)
        for result in (fused, again, fused.run_decompositions()):
            torch.testing.assert_close(result.module()(x), expected)


def test_routed_layer() -> None:
    torch.manual_seed(0)
    module = NaiveMGLU(20, 8, n_masks=4, top_k=2)
    fused = fuse_exported(export(module, torch.randn(5, 20)), strict=True)
    assert operators(fused) == ["mglu.forward.default"]
    x = torch.randn(9, 20)
    torch.testing.assert_close(fused.module()(x), module(x))


class Masked(nn.Module):
    """A layer whose mask is what `mask` makes of a stored tensor."""

    def __init__(self, stored: Tensor, mask: Callable[[Tensor], Tensor], *, parameter: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(stored.shape[-2:]))
        if parameter:
            self.stored: Tensor = nn.Parameter(stored)
        else:
            self.register_buffer("stored", stored)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        m = self.mask(self.stored)
        return F.silu(F.linear(x, self.weight * m)) * F.linear(x, self.weight * (1 - m))


BINARY = {
    "buffer": Masked((torch.randn(6, 20) > 0).float(), lambda stored: stored),
    "parameter": Masked((torch.randn(6, 20) > 0).float(), lambda stored: stored, parameter=True),
    "computed": Masked(torch.randn(6, 20), lambda stored: torch.round(torch.sigmoid(stored))),
    "integers": Masked(torch.randint(0, 2, (6, 20)), lambda stored: stored.float()),
    "all ones": Masked(torch.ones(6, 20), lambda stored: stored),
}


@pytest.mark.parametrize("kind", BINARY)
def test_real_masks_are_proved_by_their_values(kind: str) -> None:
    module = BINARY[kind]
    report = FusionReport()
    fused = fuse_exported(export(module, torch.randn(5, 20)), report=report, strict=True)
    assert operators(fused) == ["mglu.forward.default"]
    assert set(fused.state_dict) == {"weight", "packed_masks"}
    assert [(site.route, site.packed) for site in report.fused] == [("forward", "when exported")]
    x = torch.randn(9, 20)
    torch.testing.assert_close(fused.module()(x), module(x))


def test_a_weight_of_zeros_is_no_mask() -> None:
    module = BINARY["computed"]
    try:
        weight = module.weight.data.clone()
        module.weight.data.zero_()
        assert operators(fuse_exported(export(module, torch.randn(5, 20)), strict=True)) == ["mglu.forward.default"]
    finally:
        module.weight.data.copy_(weight)


def test_masks_of_other_values_are_left_as_they_are() -> None:
    stored = (torch.randn(6, 20) > 0).float()
    stored[3, 7] = 0.5
    module = Masked(stored, lambda stored: stored)
    program, report = export(module, torch.randn(5, 20)), FusionReport()
    fused = fuse_exported(program, report=report)
    assert operators(fused) == []
    assert [bool(site.reason) for site in report.missed] == [True]
    x = torch.randn(9, 20)
    assert torch.equal(fused.module()(x), program.module()(x))
    with pytest.raises(FusionError, match="nothing proves"):
        fuse_exported(program, strict=True)
    with pytest.raises(ValueError, match="neither 0 nor 1"):
        fuse_exported(program, assume_binary=True)


def test_strict_wants_a_layer() -> None:
    with pytest.raises(FusionError, match="no MGLU layer"):
        fuse_exported(export(nn.Linear(4, 4), torch.randn(3, 4)), strict=True)


class Counting(nn.Module):
    """Its logits change at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 20))
        self.register_buffer("logits", torch.randn(2, 6, 20))

    def forward(self, x: Tensor) -> Tensor:
        self.logits.neg_()
        return torch.ops.mglu.forward_ste(x, self.weight, self.logits)[0]


def test_masks_that_change_are_packed_at_each_call() -> None:
    module, x = Counting(), torch.randn(5, 20)
    fused = fuse_exported(export(module, x))
    assert operators(fused) == ["mglu.pack_masks.default", "mglu.forward.default"]
    run = fused.module()
    first, second = run(x), run(x)
    assert not torch.allclose(first, second)
    torch.testing.assert_close(run(x), first)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = NaiveMGLU(12, 12, n_masks=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


def test_shared_masks_are_packed_once() -> None:
    module = Shared()
    fused = fuse_exported(export(module, torch.randn(5, 12)), strict=True)
    assert len(layers_of(fused.graph)) == 2
    assert [name for name in fused.state_dict if "packed" in name] == ["layer.packed_masks"]
    x = torch.randn(3, 12)
    torch.testing.assert_close(fused.module()(x), module(x))


class Inference(nn.Module):
    """It turns gradients off by itself, which an export with grad mode on records."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = NaiveMGLU(12, 12, n_masks=2)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.layer(x) + x
        return self.head(y)


def test_layers_under_no_grad_are_found() -> None:
    module = Inference()
    program = export(module, torch.randn(5, 12), grad=True)
    assert "wrap_with_set_grad_enabled" in str(program.graph)
    fused = fuse_exported(program, strict=True)
    assert operators(fused) == ["mglu.forward.default"]
    assert "layer.packed_masks" in fused.state_dict
    x = torch.randn(3, 12)
    torch.testing.assert_close(saved_and_loaded(fused).module()(x), module(x))


class Transposed(nn.Module):
    """The weight as `[in_features, out_features]`; `tied`: read by something else too."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 6))
        self.mask_logits = nn.Parameter(torch.randn(20, 6))
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        m = (self.mask_logits > 0).to(x.dtype)
        y = F.silu(x @ (self.weight * m)) * (x @ (self.weight * (1 - m)))
        return y @ self.weight.t() if self.tied else y


@pytest.mark.parametrize("tied", [False, True])
def test_a_weight_is_stored_once(tied: bool) -> None:
    module = Transposed(tied)
    fused = fuse_exported(export(module, torch.randn(5, 20)), strict=True)
    assert set(fused.state_dict) == {"packed_masks", "weight" if tied else "fused_weight"}
    x = torch.randn(3, 20)
    torch.testing.assert_close(fused.module()(x), module(x))


# --- Packages -------------------------------------------------------------------------------------------------------

CHECKS = pytest.mark.slow


@CHECKS
@pytest.mark.parametrize("package", ["operator", "composite"])
def test_package_does_what_the_model_does(packages: Path, package: str) -> None:
    loaded, layers = mglu_ops.load(packages / f"{package}.pt2"), model()
    for tokens in (1, 2, 7, 64):
        torch.testing.assert_close(loaded(inputs(tokens)), layers(inputs(tokens)).detach())


@CHECKS
def test_package_holds_packed_masks_and_no_logits(packages: Path) -> None:
    path = packages / "operator.pt2"
    loaded = mglu_ops.load(path)
    names = loaded._runner.get_constant_fqns()
    assert {"0.packed_masks", "2.packed_masks", "0.weight"} <= set(names)
    assert not any("logits" in name for name in names)
    layers = model()
    logits = sum(layer.mask_logits.numel() * 4 for layer in (layers[0], layers[2]))
    with zipfile.ZipFile(path) as archive:
        (code,) = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    bits = layers[0].mask_logits > 0
    packed = torch.ops.mglu.pack_masks(bits).numpy().tobytes()
    assert packed in code
    assert layers[0].weight.detach().numpy().tobytes() in code
    assert layers[0].mask_logits.detach().numpy().tobytes() not in code
    assert len(packed) * 32 == layers[0].mask_logits.numel() * 4
    assert logits > 0


@CHECKS
def test_description(packages: Path) -> None:
    info = read_info(packages / "operator.pt2")
    assert (info.torch, info.device, info.backend, info.calls) == (torch.__version__, "cpu", "cpu", "operator")
    assert [(layer.n_masks, layer.out_features, layer.in_features) for layer in info.layers] == [
        (4, 96, 64),
        (2, 40, 64),
    ]
    assert [layer.route_dtype for layer in info.layers] == [None, "float32"]
    (tensor,) = info.inputs
    assert tensor.dtype == "float32"
    (low, high), features = tensor.shape
    assert low <= 1
    assert high is None
    assert features == 64
    assert read_info(packages / "shim.pt2").calls == "shim"
    assert read_info(packages / "composite.pt2").calls == "nothing"


@CHECKS
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda x: (x.double(),), "got float64"),
        (lambda x: (x[:, :63],), "float32 \\[3, 63\\]"),
        (lambda x: (x[0],), "float32 \\[64\\]"),
        (lambda x: (x, x), "got 2 tensors, must be 1"),
        (lambda x: (x.to("meta"),), "on meta, must be .* on cpu"),
    ],
)
def test_wrong_inputs_are_refused(packages: Path, wrong: Callable[[Tensor], tuple[Tensor, ...]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mglu_ops.load(packages / "operator.pt2")(*wrong(inputs(3)))


@CHECKS
def test_two_packages_share_their_weights(tmp_path: Path) -> None:
    """The second is of a program that was exported with grad mode on, and takes three sizes that vary."""
    layers = model()
    file = tmp_path / "weights.pt"
    mglu_ops.export(layers, (inputs(3),), tmp_path / "one.pt2", dynamic_tokens=False, weights=file)
    program = torch.export.export(layers, (torch.randn(2, 3, 64),), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    info = mglu_ops.export(program, (), tmp_path / "two.pt2", weights=file)
    assert not info.embeds_weights
    weights = mglu_ops.load_weights(file)
    assert set(weights) == {
        "0.weight",
        "0.packed_masks",
        "1.weight",
        "1.bias",
        "2.weight",
        "2.packed_masks",
        "2.router.weight",
    }
    one, two = (mglu_ops.load(tmp_path / name, weights=weights) for name in ("one.pt2", "two.pt2"))
    x, y = inputs(3), torch.randn(4, 5, 64)
    torch.testing.assert_close(one(x), layers(x).detach())
    torch.testing.assert_close(two(y), layers(y).detach())
    with torch.no_grad():
        for tensor in (weights["2.weight"], layers[2].weight):
            tensor.mul_(-3)
    torch.testing.assert_close(one(x), layers(x).detach(), msg="the first has a copy of its own")
    torch.testing.assert_close(two(y), layers(y).detach(), msg="the second has a copy of its own")
    with pytest.raises(mglu_ops.runtime.package.PackageError, match=r"lack 0\.packed_masks"):
        mglu_ops.load(tmp_path / "one.pt2", weights={k: v for k, v in weights.items() if k != "0.packed_masks"})
    with pytest.raises(mglu_ops.runtime.package.PackageError, match="pass weights"):
        mglu_ops.load(tmp_path / "one.pt2")
    with pytest.raises(ValueError, match=r"holds another 2\.weight"):
        mglu_ops.export(layers, (inputs(3),), tmp_path / "three.pt2", weights=file)
    with pytest.raises(ValueError, match=r"must be input: float32 \[3, 64\]"):
        one(inputs(4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": F.silu}, "model: got function"),
        ({"path": "model.zip"}, "must end in .pt2"),
        ({"path": "no/such/folder/model.pt2"}, "is not a folder"),
        ({"backend": "tpu"}, "backend: got 'tpu'"),
        ({"backend": "triton"}, "is for GPUs"),
        ({"backend": "cuda"}, "the model is on cpu"),
        ({"backend": "composite", "shim": True}, "no operator to call"),
        ({"multi_arch": True}, "on GPUs of compute capability 8"),
        ({"model": nn.Linear(64, 3)}, "no MGLU layer"),
    ],
)
def test_bad_arguments(tmp_path: Path, options: dict[str, object], words: str) -> None:
    arguments = {"model": model(), "example_inputs": (inputs(3),), "path": "model.pt2", **options}
    arguments["path"] = tmp_path / str(arguments["path"])
    with pytest.raises(ValueError, match=words):
        mglu_ops.export(**arguments)
    assert not list(tmp_path.iterdir())


def test_sizes_that_cannot_vary_are_said(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = MGLU(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + torch.ones(3, 8)

    with pytest.raises(ValueError, match="fixes every size"):
        mglu_ops.export(Fixed(), (torch.randn(3, 8),), tmp_path / "model.pt2")


def test_a_program_of_one_token_is_refused(tmp_path: Path) -> None:
    """For torch would take it, and compile what is right for one token alone."""
    import torch.fx.experimental._config as symbolic

    with torch.no_grad(), symbolic.patch(backed_size_oblivious=True):
        program = torch.export.export(MGLU(8, 8), (torch.randn(1, 8),), dynamic_shapes=({0: Dim.DYNAMIC},))
    with pytest.raises(ValueError, match="example of size 1"):
        mglu_ops.export(program, (), tmp_path / "model.pt2")
