"""`convert`: layers fitted one after the other on real inputs, what it samples, how it goes on, what it refuses."""

from __future__ import annotations

import copy
import os
from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mglu_ops.nn import MGLUFeedForward, convert, fitted_conversion, fitting, from_swiglu
from mglu_ops.nn.conversion import GatedUnit

H, D = 16, 24


class SwiGLU(nn.Module):
    def __init__(self, activation=F.silu):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(H, D, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(D, H, bias=False)
        self.activation = activation

    def forward(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Model(nn.Module):
    """A residual model whose layers run in another order than that of their names."""

    def __init__(self, *layers):
        super().__init__()
        self.norm, self.dropout = nn.RMSNorm(H), nn.Dropout(0.5)
        self.layers = nn.ModuleList(layers)

    def forward(self, x, times=1):
        for layer in reversed(self.layers):
            for _ in range(times):
                x = x + self.dropout(layer(self.norm(x)))
        return x


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(fitting, "ADAM_STEPS", 40)
    monkeypatch.setattr(fitting, "ADAM_TOKENS", 128)
    torch.manual_seed(0)


def huge(model):
    model.layers[0].down_proj.weight.data *= 1e30
    return model


def large_in_float16(model):
    layer = model.layers[0]
    layer.up_proj.weight.data *= 1e-3
    layer.down_proj.weight.data *= 6e4 / layer.down_proj.weight.abs().max()
    return model.half()


def with_nan(model):
    model.layers[0].up_proj.weight.data[0, 0] = float("nan")
    return model


def model_and_batches(count=4, activation=F.silu):
    model = Model(SwiGLU(activation), SwiGLU(activation))
    for name, parameter in model.named_parameters():
        if "gate" in name or "up" in name:
            parameter.data *= 4  # as after training: random layers of torch are nearly linear
    return model, [torch.randn(2, 128, H) for _ in range(count)]


def error(model, wanted, batches):
    with torch.no_grad():
        pairs = [(model.eval()(x), wanted.eval()(x)) for x in batches]
    return float(sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs))


@pytest.mark.parametrize("n_masks", [1, 3])
def test_the_copy_is_nearer_to_the_model_than_one_by_magnitude(n_masks):
    model, batches = model_and_batches()
    before = copy.deepcopy(model.state_dict())
    result = convert(model, batches, n_masks, tokens=1024, progress=False)
    assert list(result.errors) == ["layers.1", "layers.0"]
    for errors in result.errors.values():
        assert list(errors) == ["magnitude", *fitting.STEPS]
        assert 0 < errors["joint"] < errors["down"] < errors["magnitude"]
    layer = result.model.layers[1]
    assert isinstance(layer, MGLUFeedForward)
    assert layer.mglu.n_masks == n_masks
    assert layer.mglu.mask_logits.requires_grad
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    held_out = [torch.randn(2, 64, H) for _ in range(2)]
    assert error(result.model, model, held_out) < 0.9 * error(from_swiglu(model, n_masks), model, held_out)


def test_an_expert_is_fitted_on_its_own_tokens_and_on_others_if_these_are_few(monkeypatch):
    sizes, samples = (3, 5, H), []

    def record(unit, x, n_masks):
        samples.append((unit, x))
        value = float(len(samples))
        return unit.gate, torch.ones(n_masks, *unit.gate.shape, dtype=torch.bool), unit.down, {"joint": value}

    monkeypatch.setattr(fitted_conversion, "fit_unit", record)
    unit = GatedUnit(torch.randn(sizes), torch.randn(sizes), torch.randn(3, H, 5), "silu")
    x = torch.arange(60.0)[:, None].expand(-1, H)
    ids = torch.tensor([[0, 9]] * 20 + [[1, 0]] * 10 + [[9, 9]] * 30)  # expert 0 has 30 tokens, 1 has 10, 2 has none
    weight, masks, down, errors = fitted_conversion.fit_experts(unit, x, 2, ids)
    assert [of[:, 0].tolist() for _, of in samples] == [[*range(30)], [*range(20, 30), *range(6)], [*range(16)]]
    assert all(one.activation == "silu" and torch.equal(one.up, unit.up[i]) for i, (one, _) in enumerate(samples))
    assert torch.equal(weight, unit.gate)
    assert torch.equal(down, unit.down)
    assert masks.shape == (3, 2, 5, H)
    assert errors == {"joint": 2.0}


def test_errors_are_those_of_the_layers():
    model, batches = model_and_batches()
    result = convert(model, batches, tokens=10**6, progress=False)
    x = torch.cat([model.norm(x) for x in batches])
    with torch.no_grad():
        wanted, found = model.layers[1](x), result.model.layers[1](x)
    expected = float((found - wanted).square().sum() / wanted.square().sum())
    assert result.errors["layers.1"]["joint"] == pytest.approx(expected, rel=1e-3)


def test_modes_stay_and_inputs_are_computed_in_evaluation_mode():
    model, batches = model_and_batches()
    model.train()
    model.layers[0].eval()
    first = convert(model, batches, tokens=512, progress=False)
    assert first.model.training
    assert not first.model.layers[0].training
    assert model.training
    second = convert(model.eval(), batches, tokens=512, progress=False)
    assert first.errors == second.errors, "dropout would change them"


def test_batches_are_arguments_of_any_kind():
    model, batches = model_and_batches()
    kinds = (lambda x: x, lambda x: (x,), lambda x: {"x": x, "times": 1})
    errors = [convert(model, [*map(kind, batches)], tokens=512, progress=False).errors for kind in kinds]
    run = convert(model, [*range(4)], tokens=512, progress=False, run=lambda model, i: model(batches[i])).errors
    assert errors == [run] * 3


def test_a_layer_that_runs_several_times_is_fitted_to_all_its_inputs(monkeypatch):
    model, batches = model_and_batches()
    seen = []
    monkeypatch.setattr(fitted_conversion, "fit_unit", lambda unit, x, n: seen.append(len(x)) or fit_unit(unit, x, n))
    convert(model, [{"x": x, "times": 3} for x in batches], tokens=600, progress=False)
    assert seen == [600, 600]
    seen.clear()
    convert(model, [{"x": x, "times": i} for x, i in zip(batches, (2, 1, 2, 2), strict=True)], progress=False)
    assert seen == [7 * 256] * 2, "a batch with fewer calls must not end those of the next batch"


fit_unit = fitted_conversion.fit_unit


def test_a_shared_layer_is_one_layer():
    layer = SwiGLU()
    result = convert(Model(layer, layer), [torch.randn(2, 64, H)], progress=False)
    assert len(result.errors) == 1
    assert result.model.layers[0] is result.model.layers[1]


def test_a_stopped_conversion_goes_on(tmp_path, monkeypatch):
    model, batches = model_and_batches()
    options = {"tokens": 512, "progress": False}
    whole = convert(model, batches, **options)

    def stop(unit, x, n_masks):
        if calls.append(1) or len(calls) == 2:
            raise KeyboardInterrupt
        return fit_unit(unit, x, n_masks)

    calls = []
    monkeypatch.setattr(fitted_conversion, "fit_unit", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(model, batches, folder=tmp_path / "fits", **options)
    again = convert(model, batches, folder=tmp_path / "fits", **options)
    assert len(calls) == 3
    assert again.errors == whole.errors
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value)
    assert {file.name for file in (tmp_path / "fits").iterdir()} == {"0000.pt", "0001.pt"}
    flipped = [x.flip(0) for x in batches]
    others = (
        ("n_masks", {"n_masks": 2}, model, batches),
        ("weights", {}, Model(SwiGLU(), SwiGLU()), batches),
        ("batches", {}, model, flipped),
    )
    for name, wrong, changed, given in others:
        with pytest.raises(ValueError, match=rf"folder: got .*0000\.pt of a conversion with {name} "):
            convert(changed, given, folder=tmp_path / "fits", **options, **wrong)


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    model, batches = model_and_batches()
    options = {"tokens": 512, "progress": False}
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"folder: got .*file, must be a folder"):
        convert(model, batches, folder=tmp_path / "file", **options)
    convert(model, batches, folder=tmp_path / "fits", **options)
    damaged = tmp_path / "fits" / "0001.pt"
    whole = damaged.read_bytes()
    torch.save({"other": 1}, tmp_path / "other.pt")
    for content in (b"", whole[: len(whole) // 2], (tmp_path / "other.pt").read_bytes()):
        damaged.write_bytes(content)
        with pytest.raises(ValueError, match=r"folder: got .*0001\.pt, which cannot be read .* delete it"):
            convert(model, batches, folder=tmp_path / "fits", **options)


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs a folder in which nobody can make files")
def test_a_folder_is_checked_before_the_first_fit(monkeypatch):
    model, batches = model_and_batches()
    monkeypatch.setattr(fitted_conversion, "fit_unit", lambda *_: pytest.fail("a layer was fitted"))
    with pytest.raises(ValueError, match=r"folder: /proc/0000\.pt cannot be written"):
        convert(model, batches, folder="/proc", progress=False)


def test_a_full_disk_is_an_error_and_leaves_no_part_of_a_file(tmp_path):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        with pytest.raises(ValueError, match=r"folder: .*0000\.pt cannot be written; is the disk full\?"):
            fitted_conversion.save(tmp_path / "0000.pt", {}, (torch.zeros(10000),))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_a_digest_tells_apart_what_differs():
    x = torch.randn(2, 3)
    values = [
        x,
        x.T,
        x.flip(0),
        x.bfloat16(),
        x[:1],
        {"x": x},
        {"y": x},
        [x],
        [x, x],
        [x, 1],
        [x, 2],
        [x, "1"],
        [x, None],
    ]
    assert len({fitted_conversion.digest(value) for value in values}) == len(values)
    assert fitted_conversion.digest([{"x": x}]) == fitted_conversion.digest([{"x": x.clone()}])
    for dtype in (torch.int64, torch.float64, torch.float16, torch.bool):
        tensor = torch.ones(2, 3, dtype=dtype)
        fitted_conversion.digest(tensor)
        assert (tensor == 1).all(), "the tensor must not change"


def test_padding_is_left_out_of_the_sample(monkeypatch):
    class Padded(Model):
        def forward(self, x, attention_mask=None):
            return super().forward(x)

    model, batches = Padded(SwiGLU(), SwiGLU()), model_and_batches()[1]
    masks = [torch.arange(128) < torch.tensor([[128], [40 + i]]) for i in range(len(batches))]
    seen = []
    monkeypatch.setattr(fitted_conversion, "fit_unit", lambda unit, x, n: seen.append(x) or fit_unit(unit, x, n))
    padded = [
        UserDict(x=x.masked_fill(~mask[..., None], float("nan")), attention_mask=mask.long())
        for x, mask in zip(batches, masks, strict=True)
    ]
    convert(model, padded, progress=False)
    wanted = torch.cat([model.norm(x[mask]) for x, mask in zip(batches, masks, strict=True)])
    assert torch.equal(seen[0].sort(0).values, wanted.sort(0).values)


def test_settings_of_the_caller_do_not_change_the_fit():
    model, batches = model_and_batches()
    alone = Model(model.layers[0])

    def fitted():
        return convert(alone, batches, 5, tokens=512, progress=False)

    wanted = fitted()
    with torch.inference_mode():
        found = [fitted()]
    assert not any(parameter.is_inference() for parameter in found[0].model.parameters())
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            found.append(fitted())
        finally:
            torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        found.append(fitted())
    with torch.autocast("cpu", torch.bfloat16):  # norms are not in bfloat16, so the layer's inputs are the same
        found.append(fitted())
    assert [one.errors for one in found] == [wanted.errors] * len(found)


@pytest.mark.parametrize("n_masks", [1, 3])
@pytest.mark.parametrize("names", [["gate"], ["up"], ["gate", "up"], ["down"]])
@pytest.mark.parametrize("rows", [slice(3, 4), slice(None)])
def test_dead_neurons_leave_the_fit_finite(n_masks, names, rows):
    model, batches = model_and_batches(activation=F.relu)
    for name in names:
        model.layers[1].get_submodule(f"{name}_proj").weight.data[rows] = 0
    result = convert(model, batches, n_masks, tokens=512, progress=False)
    assert all(parameter.isfinite().all() for parameter in result.model.parameters())
    errors = result.errors["layers.1"]
    assert errors["joint"] == 0 if rows == slice(None) else 0 < errors["joint"] < errors["magnitude"]


def test_the_table_has_a_line_for_each_layer():
    result = fitted_conversion.Conversion(
        None, {"a": {"magnitude": 0.5, "joint": 0.25}, "b": {"magnitude": 1, "joint": 0}}
    )
    assert result.table().splitlines() == [
        "| layer | magnitude | joint |",
        "| --- | --- | --- |",
        "| a | 0.5000 | 0.2500 |",
        "| b | 1.0000 | 0.0000 |",
    ]


def test_16_bits_are_fitted_in_float32():
    model, batches = model_and_batches(activation=F.gelu)
    result = convert(model.bfloat16(), [x.bfloat16() for x in batches], tokens=1024, progress=False)
    assert result.model.layers[0].mglu.weight.dtype == result.model.layers[0].down_proj.weight.dtype == torch.bfloat16
    assert all(0 < errors["joint"] < errors["magnitude"] for errors in result.errors.values())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batches": iter([])}, TypeError, "batches: got list_iterator, must be a sequence"),
        ({"batches": torch.randn(2, 64, H)}, TypeError, r"batches: got Tensor, .* take \[batches\] for one batch, or"),
        ({"batches": []}, ValueError, "batches: got none, must be at least one"),
        ({"batches": [torch.randn(1, 7, H)]}, ValueError, r"batches: got 7 tokens for layers\.1, must be at least"),
        (
            {"batches": [torch.full((2, 64, H), float("nan"))]},
            ValueError,
            r"inputs of layers\.1 that are NaN",
        ),
        ({"batches": [{"x": torch.randn(2, 64, H), "times": 0}]}, ValueError, "does not run, must run all layers"),
        ({"tokens": 15}, ValueError, "tokens: got 15, must be an int of at least the hidden size, 16"),
        ({"tokens": True}, ValueError, "tokens: got True, must be an int"),
        ({"model": with_nan(Model(SwiGLU(), SwiGLU()))}, ValueError, r"model: got weights of layers\.0 that are NaN"),
        (
            {"batches": [torch.randn(2, 64, H)], "model": huge(Model(SwiGLU()))},
            ValueError,
            r"layers\.0, whose fit is NaN",
        ),
        (
            {"batches": [torch.randn(2, 64, H).half()], "model": large_in_float16(Model(SwiGLU()))},
            ValueError,
            r"model: got layers\.0 in torch\.float16, which cannot hold its fitted weights, must be",
        ),
        ({"folder": 3}, TypeError, "folder: got int, must be a path"),
        ({"n_masks": 17}, ValueError, "n_masks: got 17"),
        ({"projections": ["a", "b", "c"]}, ValueError, "must have a module with linear layers named a, b, c"),
    ],
)
def test_what_cannot_be_fitted_is_refused(options, error, message):
    model, batches = model_and_batches()
    with pytest.raises(error, match=message):
        convert(**{"model": model, "batches": batches, "progress": False, **options})
    assert not any(module._forward_pre_hooks for module in model.modules())
