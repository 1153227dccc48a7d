"""Packages of `export` compute what the model computes, hold what they should, and refuse wrong inputs."""

from __future__ import annotations

import copy
import importlib
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import mglu_ops
from mglu_ops.backends.cpu.build import BuildError
from mglu_ops.formats import FORMATS
from mglu_ops.nn import MGLU, MGLUExpertsFeedForward
from mglu_ops.packaging import composite
from mglu_ops.packaging.package import LayerInfo, read_info
from mglu_ops.packaging.seal import PackageError
from tests.support.layers import Layer, assert_within_condition, layers, make_down, make_layer
from tests.support.packaging import frozen_experts, inputs, model, write_archive

pytest_plugins = ["tests.support.packaging"]

long = pytest.mark.long


@pytest.mark.parametrize(
    ("fixture", "name"), [("packages", "operator"), pytest.param("more_packages", "composite", marks=long)]
)
def test_a_package_agrees_with_its_model(request: pytest.FixtureRequest, fixture: str, name: str) -> None:
    """One package calls the operator. The other contains compiled operations of torch (backend "composite")."""
    loaded, layers = mglu_ops.load(request.getfixturevalue(fixture) / f"{name}.pt2"), model()
    for tokens in (1, 2, 7, 64):
        torch.testing.assert_close(loaded(inputs(tokens)), layers(inputs(tokens)).detach())


@long
def test_a_package_with_a_weights_file_agrees_with_its_model(more_packages: Path) -> None:
    bare, x = more_packages / "bare.pt2", inputs(1)
    info = read_info(bare)
    assert (info.backend, info.embeds_weights, info.inputs[0].shape) == ("cpu", False, [1, 64])
    loaded = mglu_ops.load(bare, weights=more_packages / "weights.pt")
    torch.testing.assert_close(loaded(x), model()(x).detach())
    with pytest.raises(PackageError, match="pass weights="):
        mglu_ops.load(bare)
    with pytest.raises(ValueError, match=r"must be input: float32 \[1, 64\]"):
        loaded(inputs(4))


@given(layers())
def test_the_torch_operations_of_a_package_agree_with_the_oracle(layer: Layer) -> None:
    result = composite.forward(layer.given)
    assert result.dtype is layer.x.dtype
    assert_within_condition(result, layer)


@long
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("2.weight", lambda w: w[:1], r"2\.weight: got float32 \[1, 96\] .* must be float32 \[64, 96\] with the"),
        ("2.bias", lambda w: w.double(), r"2\.bias: got float64 \[64\] .* on cpu, must be float32 \[64\]"),
        ("2.weight", lambda w: w.t().contiguous().t(), r"with the strides \[1, 64\] on cpu, must be .*\[96, 1\]"),
        ("2.bias", lambda w: w.to_sparse(), r"got a tensor of the layout torch\.sparse_coo on cpu, must be"),
        ("2.bias", lambda w: w.to("meta"), r"on meta, must be float32 .* on cpu"),
        ("1.packed_masks", lambda w: None, r"1\.packed_masks: got NoneType, must be uint8 \[96, 8, 4\]"),
    ],
)
def test_weights_of_another_layout_are_refused(more_packages, name, change, words):
    """A package's code reads weights with the layout that it was compiled for, without checking them."""
    weights = mglu_ops.load_weights(more_packages / "weights.pt")
    with pytest.raises(PackageError, match=words):
        mglu_ops.load(more_packages / "bare.pt2", weights={**weights, name: change(weights[name])})


class RoutedExperts(nn.Module):
    """Experts and a down projection in a weight format, with expert ids and expert weights as inputs."""

    def __init__(self, weight_format: str = "dense", in_features: int = 128) -> None:
        super().__init__()
        layer = make_layer((6,), in_features, 128, routing="ids", experts=3, weight_format=weight_format)
        names = "weight", "packed_masks", "weight_scale", "down_weight", "down_scale"
        given, down = layer.given, make_down(layer, weight_format)
        for name, value in zip(names, (*given[1:3], given.weight_scale, down.weight, down.weight_scale), strict=True):
            self.register_buffer(name, value)
        self.weight_format = weight_format

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        stored = self.weight_scale, self.weight_format
        y = torch.ops.mglu.experts_forward(x, self.weight, self.packed_masks, expert_ids, "gelu", None, *stored)
        return torch.ops.mglu.experts_down(
            y, self.down_weight, expert_ids, expert_weights, self.down_scale, self.weight_format
        )


@long
@pytest.mark.parametrize("weight_format", ["dense", "int4_group"])
def test_a_package_gives_the_bits_of_the_operators_over_experts(tmp_path: Path, weight_format: str) -> None:
    """Covers experts without rows, and ids out of range."""
    model, path = RoutedExperts(weight_format).eval(), tmp_path / "model.pt2"

    def example(tokens: int) -> tuple[Tensor, ...]:
        return torch.randn(tokens, 128), torch.randint(-1, 4, (tokens, 2)), torch.rand(tokens, 2)

    mglu_ops.export(model, example(1), path)
    package = mglu_ops.load(path)
    for tokens in (1, 2, 7, 64):
        given = example(tokens)
        assert torch.equal(package(*given), model(*given))


@long
def test_a_package_of_experts_agrees_with_its_model_and_describes_itself(expert_package: Path) -> None:
    package, model = mglu_ops.load(expert_package), frozen_experts()
    for tokens in (1, 2, 7, 64):
        torch.testing.assert_close(package(inputs(tokens)), model(inputs(tokens)).detach())
    assert package.info.layers == [
        LayerInfo(3, 40, 64, "float32", "silu", "float32", experts=5, top_k=2),
        LayerInfo(0, 64, 40, "float32", "identity", "float32", experts=5, top_k=2),
    ]
    assert " 1 MGLU layer," in str(package.info)


@long
def test_a_package_of_experts_that_learn_holds_no_logits(tmp_path: Path) -> None:
    model, path = MGLUExpertsFeedForward(3, 16, 24, 2, n_masks=2).eval(), tmp_path / "model.pt2"
    mglu_ops.export(model, (torch.randn(1, 16),), path)
    package = mglu_ops.load(path)
    for tokens in (1, 9):
        x = torch.randn(tokens, 16)
        torch.testing.assert_close(package(x), model(x).detach())
    names = package._runner.get_constant_fqns()
    assert "experts.packed_masks" in names
    assert "experts.mask_logits" not in names


def test_experts_are_refused_by_name_where_they_do_not_run(tmp_path: Path) -> None:
    words = "backend: got 'composite', which has no code for the model's mglu::experts_forward"
    with pytest.raises(ValueError, match=words):
        mglu_ops.export(frozen_experts(), (inputs(1),), tmp_path / "model.pt2", backend="composite")


def test_packed_masks_of_experts_are_checked(tmp_path: Path) -> None:
    model = RoutedExperts(in_features=20)
    model.packed_masks[2] = 255  # sets the bits of the padding too
    example = torch.randn(1, 20), torch.zeros(1, 2, dtype=torch.int64), torch.rand(1, 2)
    with pytest.raises(ValueError, match=r"model: packed_masks: .*padding"):
        mglu_ops.export(model, example, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


class Alternating(nn.Module):
    """A layer that negates its mask after each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 20))
        self.register_buffer("mask", torch.rand(6, 20) > 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(F.linear(x, self.weight * self.mask)) * F.linear(x, self.weight * ~self.mask)
        self.mask.logical_not_()
        return y


@long
@pytest.mark.parametrize("backend", ["cpu", "composite"])
def test_a_package_sees_what_its_model_writes(tmp_path: Path, backend: str) -> None:
    module, x = Alternating().eval(), torch.randn(5, 20)
    mglu_ops.export(copy.deepcopy(module), (x,), tmp_path / "model.pt2", backend=backend)
    loaded = mglu_ops.load(tmp_path / "model.pt2")
    results = [module(x).detach() for _ in range(3)]
    for result in results:
        torch.testing.assert_close(loaded(x), result, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(results[0], results[1])


def test_package_holds_packed_masks_and_no_logits(packages: Path) -> None:
    path = packages / "operator.pt2"
    names = mglu_ops.load(path)._runner.get_constant_fqns()
    assert {"1.packed_masks", "3.packed_masks", "1.weight"} <= set(names)
    assert not any("logits" in name for name in names)
    layer = model()[1]
    with zipfile.ZipFile(path) as archive:
        (code,) = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    assert torch.ops.mglu.pack_logits(layer.mask_logits).numpy().tobytes() in code
    assert layer.weight.detach().numpy().tobytes() in code
    assert layer.mask_logits.detach().numpy().tobytes() not in code


def test_a_package_describes_itself(packages: Path) -> None:
    info = read_info(packages / "operator.pt2")
    assert (info.torch, info.device, info.backend) == (torch.__version__, "cpu", "cpu")
    assert info.layers == [
        LayerInfo(4, 96, 64, "float32", "silu", None),
        LayerInfo(2, 40, 64, "float32", "silu", "float32"),
        *(LayerInfo(3, 130, 136, "float32", "gelu", None, name) for name in FORMATS if name != "dense"),
    ]
    (tensor,) = info.inputs
    (low, high, symbol), features = tensor.shape
    assert (tensor.dtype, low <= 1, high, symbol.isidentifier(), features) == ("float32", True, None, True, 64)


def freed(tensor: Tensor) -> Tensor:
    copied = tensor.clone()
    copied.untyped_storage().resize_(0)
    return copied


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda x: (x.double(),), "got float64"),
        (lambda x: (x[:, :63],), "float32 \\[3, 63\\]"),
        (lambda x: (x[0],), "float32 \\[64\\]"),
        (lambda x: (x, x), "got 2 positional arguments, must be nested like .*, 1 positional argument .input: float32"),
        (lambda x: (), "got 0 positional arguments, must be nested like"),
        (lambda x: ([x],), "input: got list, must be a tensor"),
        (lambda x: (x.to("meta"),), "on meta, must be .* on cpu"),
        (lambda x: (x.to_sparse(),), "input: got a tensor of layout sparse_coo, must be a dense tensor"),
        (lambda x: (freed(x),), "input: got a tensor of shape .* whose storage has 0 bytes, must have 768"),
    ],
)
def test_wrong_inputs_are_refused(packages: Path, wrong: Callable[[Tensor], tuple[Tensor, ...]], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        mglu_ops.load(packages / "operator.pt2")(*wrong(inputs(3)))


@long
def test_two_packages_share_their_weights(tmp_path: Path) -> None:
    """The second package comes from a program that was exported in grad mode, with two dynamic dimensions."""
    layers = model()
    file = tmp_path / "weights.pt"
    mglu_ops.export(layers, (inputs(3),), tmp_path / "one.pt2", dynamic_tokens=False, weights=file)
    program = torch.export.export(layers, (torch.randn(2, 3, 64),), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    info = mglu_ops.export(program, (), tmp_path / "two.pt2", weights=file)
    assert not info.embeds_weights
    weights = mglu_ops.load_weights(file)
    masked = {f"{layer}.{name}" for layer in (1, 3) for name in ("weight", "packed_masks")}
    stored = {f"5.{name}" for name in layers[5].state_dict()}
    assert set(weights) == masked | stored | {"0.weight", "3.router.weight"} | {
        f"{layer}.{name}" for layer in (2, 4) for name in ("weight", "bias")
    }
    one, two = (mglu_ops.load(tmp_path / name, weights=weights) for name in ("one.pt2", "two.pt2"))
    x, y = inputs(3), torch.randn(4, 5, 64)
    torch.testing.assert_close(one(x), layers(x).detach())
    torch.testing.assert_close(two(y), layers(y).detach())
    with torch.no_grad():
        for tensor in (weights["3.weight"], layers[3].weight):
            tensor.mul_(-3)
    torch.testing.assert_close(one(x), layers(x).detach(), msg="the first has a copy of its own")
    torch.testing.assert_close(two(y), layers(y).detach(), msg="the second has a copy of its own")
    with pytest.raises(PackageError, match=r"lack 1\.packed_masks"):
        mglu_ops.load(tmp_path / "one.pt2", weights={k: v for k, v in weights.items() if k != "1.packed_masks"})
    with pytest.raises(PackageError, match="pass weights"):
        mglu_ops.load(tmp_path / "one.pt2")
    with pytest.raises(ValueError, match=r"holds another 3\.weight"):
        mglu_ops.export(layers, (inputs(3),), tmp_path / "three.pt2", weights=file)
    with pytest.raises(ValueError, match=r"must be input: float32 \[3, 64\]"):
        one(inputs(4))


class ByKeyword(nn.Module):
    def forward(self, **inputs: Tensor) -> Tensor:
        return inputs["x"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": F.silu}, "model: got function"),
        ({"example_inputs": inputs(3)}, r"example_inputs: got float32 \[3, 64\], must be a tuple"),
        ({"example_inputs": None}, "example_inputs: got None, must be a tuple"),
        ({"inductor_options": {"cpp.no_such": 1}}, "inductor_options: got cpp.no_such, which torch._inductor.config"),
        ({"inductor_options": 3}, "inductor_options: got int, must be a mapping"),
        ({"weights": "/tmp"}, "weights: /tmp cannot be written: Is a directory"),
        ({"weights": "/no/such/folder/weights.pt"}, "weights: .* cannot be written: No such file or directory"),
        ({"model": model().to("meta"), "example_inputs": (inputs(3).to("meta"),)}, "are on meta; they"),
        ({"path": "model.zip"}, r"path: got .*model.zip, must be a name that ends in \.pt2"),
        ({"path": "...pt2"}, r"path: got .*/\.\.\.pt2, must be a name that ends in \.pt2"),
        ({"path": "no/such/folder/model.pt2"}, "cannot be written: No such file or directory"),
        ({"backend": "tpu"}, "backend: got 'tpu'"),
        ({"backend": "triton"}, "is for GPUs"),
        ({"backend": "cuda"}, "the model is on cpu"),
        ({"model": nn.Linear(64, 3)}, "no MGLU layer"),
        ({"model": ByKeyword()}, r"example_inputs: got float32 \[3, 64\], must be positional inputs of forward\(\*\*"),
    ],
)
def test_wrong_arguments_of_export_are_refused(tmp_path: Path, options: dict[str, object], words: str) -> None:
    arguments = {"model": MGLU(64, 8).eval(), "example_inputs": (inputs(3),), "path": "model.pt2", **options}
    arguments["path"] = tmp_path / str(arguments["path"])
    with pytest.raises(ValueError, match=words):
        mglu_ops.export(**arguments)
    assert not list(tmp_path.iterdir())


def test_triton_is_refused_for_a_format_without_a_kernel() -> None:
    layer = LayerInfo(2, 8, 16, "float16", "silu", None, "int4_group")
    check = importlib.import_module("mglu_ops.packaging.export")._check_triton
    with pytest.raises(ValueError, match=r"backend: got 'triton', .* no weight format int4_group"):
        check([layer], torch.device("cpu"))


@long
@pytest.mark.parametrize("backend", ["auto", "composite"])
def test_a_package_rounds_x(tmp_path: Path, backend: str) -> None:
    layer = MGLU(64, 8, learnable_masks=False, weight_format="fp8_row", activation_format="fp8_token").eval()
    info = mglu_ops.export(layer, (inputs(3),), tmp_path / "model.pt2", backend=backend)
    assert [layer.activation_format for layer in info.layers] == ["fp8_token"]
    torch.testing.assert_close(mglu_ops.load(tmp_path / "model.pt2")(inputs(5)), layer(inputs(5)))


def test_the_compiler_of_cxx_has_a_launcher_and_options(tmp_path, monkeypatch):
    from torch._inductor.cpp_builder import _is_gcc

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "env A=1 g++ -m64")
    compiler = importlib.import_module("mglu_ops.packaging.export")._compiler
    ((program,),) = compiler({}).values()
    assert _is_gcc(program)
    assert compiler({"cpp.cxx": ("g++",)}) == {"cpp.cxx": ("g++",)}
    monkeypatch.setenv("CXX", "env 'unfinished")
    with pytest.raises(BuildError, match='CXX: got "env \'unfinished", must be a command line'):
        compiler({})


def test_the_files_of_export_are_named_if_they_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder.pt2").mkdir()
    with pytest.raises(ValueError, match=r"path: .*folder\.pt2 cannot be written: Is a directory"):
        mglu_ops.export(model(), (inputs(3),), tmp_path / "folder.pt2")
    with pytest.raises(ValueError, match=r"weights: got .*model\.pt2, must be another file than the package"):
        mglu_ops.export(model(), (inputs(3),), tmp_path / "model.pt2", weights=tmp_path / "model.pt2")
    for name in ("path", "weights"):
        with pytest.raises(TypeError, match=f"^{name}: got int, must be a path"):
            mglu_ops.export(model(), (inputs(3),), **{"path": tmp_path / "model.pt2", name: 3})


def test_an_error_of_torch_export_is_short(tmp_path: Path) -> None:
    words = r"export failed on example_inputs float32 \[3, 65\]: RuntimeError: "
    with pytest.raises(ValueError, match=words) as caught:
        mglu_ops.export(model(), (torch.randn(3, 65),), tmp_path / "model.pt2")
    assert len("".join(traceback.format_exception(caught.value)).splitlines()) < 40


class NotCompiledError(Exception):
    pass


def fail_to_compile(program: object, package_path: str, **options: object) -> None:
    Path(package_path).write_bytes(b"half a package")
    raise NotCompiledError


def test_an_unfinished_export_leaves_the_older_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older package stays while the new one is compiled, and stays for good if that fails or is killed."""
    path, seen = tmp_path / "model.pt2", []

    def compile_half(program: object, package_path: str, **options: object) -> None:
        try:
            fail_to_compile(program, package_path)
        finally:
            seen.append(path.read_bytes() if path.exists() else None)

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_half)
    for before in (None, b"an older package"):
        if before is not None:
            path.write_bytes(before)
        with pytest.raises(NotCompiledError):
            mglu_ops.export(model(), (inputs(3),), path)
        assert list(tmp_path.iterdir()) == ([] if before is None else [path])
    assert seen == [None, path.read_bytes()] == [None, b"an older package"]


def test_export_replaces_the_file_that_a_link_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_nothing(program: object, package_path: str, **options: object) -> None:
        write_archive(Path(package_path), {"new": "code"})

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_nothing)
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "version1.pt2", tmp_path / "model.pt2"
    target.write_bytes(b"an older package")
    link.symlink_to(target)
    mglu_ops.export(model(), (inputs(3),), link)
    assert link.is_symlink()
    assert list((tmp_path / "folder").iterdir()) == [target]
    assert zipfile.ZipFile(target).namelist() == ["new"]


def test_a_folder_that_takes_no_new_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "model.pt2").touch()
    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(ValueError, match=r"path: .*model\.pt2 cannot be written: Permission denied in "):
        mglu_ops.export(model(), (inputs(3),), tmp_path / "model.pt2")


def warnings_of_export(module: nn.Module | ExportedProgram, path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail_to_compile)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(NotCompiledError):
            mglu_ops.export(module, (torch.randn(3, 8),), path)
    return [str(each.message) for each in caught if "mglu_ops.export" in str(each.message)]


class VariableArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = MGLU(8, 8)

    def forward(self, *inputs: Tensor, **others: Tensor) -> Tensor:
        return self.layer(inputs[0])


@pytest.mark.parametrize(
    ("module", "shapes"),
    [
        (VariableArguments(), None),
        (torch.compile(VariableArguments()), None),
        (torch.compile(MGLU(8, 8)), None),
        (torch.compile(MGLU(8, 8)), {"x": {0: Dim.AUTO}}),
    ],
)
def test_any_signature_of_forward_is_taken(module, shapes, tmp_path, monkeypatch):
    """The wrapper that torch.compile returns has a forward with `*args`."""
    compiled = []

    def keep(program: ExportedProgram, **options: object) -> None:
        compiled.append(program)
        raise NotCompiledError

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", keep)
    with pytest.raises(NotCompiledError):
        mglu_ops.export(module.eval(), (torch.randn(3, 8),), tmp_path / "model.pt2", dynamic_shapes=shapes)
    assert compiled[0].range_constraints
    assert not any("_orig_mod" in name for name in compiled[0].state_dict)


def test_a_model_in_training_mode_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.export` keeps training mode, which few models want in a package."""
    dropping = nn.Sequential(MGLU(8, 8), nn.Dropout(0.5))
    path = tmp_path / "model.pt2"
    for module in (dropping, torch.export.export(dropping, (torch.randn(3, 8),))):
        (words,) = warnings_of_export(module, path, monkeypatch)
        assert "in training mode" in words
        assert "call model.eval() before" in words
    assert "dropout" in words
    dropping.eval()
    for module in (dropping, torch.export.export(dropping, (torch.randn(3, 8),))):
        assert warnings_of_export(module, path, monkeypatch) == []


def test_sizes_that_cannot_vary_are_reported(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = MGLU(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + torch.ones(3, 8)

    with pytest.raises(ValueError, match="fixes every size"):
        mglu_ops.export(Fixed(), (torch.randn(3, 8),), tmp_path / "model.pt2")


def test_a_program_of_one_token_is_refused(tmp_path: Path) -> None:
    """For such a program, torch would compile code that is right for one token only."""
    import torch.fx.experimental._config as symbolic

    with torch.no_grad(), symbolic.patch(backed_size_oblivious=True):
        program = torch.export.export(MGLU(8, 8), (torch.randn(1, 8),), dynamic_shapes=({0: Dim.DYNAMIC},))
    with pytest.raises(ValueError, match="example of size 1"):
        mglu_ops.export(program, (), tmp_path / "model.pt2")
