"""The benchmark's variants in vLLM's kernels, without vLLM: names, layouts, and what is said where vLLM is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import decode, pages, vllm_kernels
from benchmarks.layers import ExpertLayers, Layers, Model
from benchmarks.records import Row, write
from benchmarks.timing import Variant
from mglu_ops.formats import FORMATS
from tests.support.commands import row

MODEL = Model(experts=4, out_features=64, in_features=128, top_k=2)


@pytest.fixture(autouse=True)
def _forget_vllm() -> Iterator[None]:
    vllm_kernels.why_missing.cache_clear()
    yield
    vllm_kernels.why_missing.cache_clear()


def experts(weight_format: str, whole: bool = False, tokens: int = 3) -> ExpertLayers:
    return ExpertLayers(MODEL, tokens, weight_format=weight_format, masks=(1,), whole=whole, device="cpu", count=2)


def layers(weight_format: str) -> Layers:
    return Layers(128, 256, 1, 3, torch.bfloat16, device="cpu", count=4, weight_format=weight_format)


@pytest.mark.parametrize("make", [layers, experts])
def test_a_missing_vllm_is_said(make: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    found, refused = decode.those_that_run(decode.vllm_variants(make("fp8_row")))
    assert (found, refused) == ([], {"SwiGLU vLLM": "vLLM is not installed"})
    assert "SwiGLU vLLM is left out: vLLM is not installed" in capsys.readouterr().out


def test_a_broken_vllm_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("import torch; torch.of_another_version")
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "has no attribute 'of_another_version'" in str(vllm_kernels.why_missing())


def test_kernels_of_each_format(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(variants: Iterator[Variant]) -> list[str]:
        return [one.name.removeprefix("SwiGLU vLLM ") for one in variants]

    of_layers = {one: names(vllm_kernels.swiglu_variants(layers(one))) for one in FORMATS}
    assert of_layers == {
        "dense": ["F.linear"],
        "fp8_row": ["cutlass_scaled_mm", "Marlin"],
        "fp8_block": ["Marlin"],
        "int8_row": ["Marlin"],
        "int4_group": ["Marlin"],
    }
    of_experts = {one: names(vllm_kernels.expert_variants(experts(one))) for one in ("dense", "fp8_row", "int4_group")}
    assert of_experts == {
        "dense": ["fused_experts"],
        "fp8_row": ["fused_experts", "Marlin"],
        "int4_group": ["Marlin"],
    }


def test_an_error_of_a_kernel_refuses_its_variant(capsys: pytest.CaptureFixture[str]) -> None:
    def run(i: int) -> Tensor:
        raise AssertionError("Hidden size mismatch")

    found, refused = decode.those_that_run([Variant("SwiGLU vLLM Marlin", run, 1)])
    assert (found, refused) == ([], {"SwiGLU vLLM Marlin": "refused"})
    assert "SwiGLU vLLM Marlin is refused: AssertionError('Hidden size mismatch')" in capsys.readouterr().out
    with pytest.raises(AssertionError):
        decode.those_that_run([Variant("SwiGLU of ours", run, 1)])


class Vllm:
    """vLLM's modules, in which the conversion to Marlin's layout leaves the layout of GPTQ as it is."""

    scalar_types = SimpleNamespace(
        float8_e4m3fn=SimpleNamespace(name="float8_e4m3fn", size_bits=8),
        uint8b128=SimpleNamespace(name="uint8b128", size_bits=8),
        uint4b8=SimpleNamespace(name="uint4b8", size_bits=4),
    )

    def gptq_marlin_repack(self, columns: Tensor, order: Tensor, h: int, n: int, bits: int) -> Tensor:
        assert columns.shape == (h * bits // 32, n)
        assert columns.is_contiguous()
        assert order.numel() == 0
        return columns

    def marlin_permute_scales(self, scales: Tensor, h: int, n: int, group: int) -> Tensor:
        assert scales.shape == (1 if group == -1 else h // group, n)
        return scales

    def fp8_fused_exponent_bias_into_scales(self, scales: Tensor) -> Tensor:
        return scales * 2.0**120


def of_gptq(weight: Tensor, number: Any) -> Tensor:
    """The numbers `[n, h]` in GPTQ's layout: those of an int32 are neighbours in a row, lowest bits first."""
    if number.name == "float8_e4m3fn":
        return weight.t().contiguous().view(torch.float8_e4m3fn).double()
    bits, bias = number.size_bits, 2 ** (number.size_bits - 1)
    parts = [(weight >> shift) & (2**bits - 1) for shift in range(0, 32, bits)]
    return torch.stack(parts, 1).flatten(0, 1).t().double() - bias


@pytest.mark.parametrize("name", list(FORMATS)[1:])
def test_weights_are_converted_to_the_layout_that_marlin_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_kernels, "_module", lambda path: Vllm())
    chosen = FORMATS[name]
    made = [chosen.quantize(torch.randn(192, 256)) for _ in range(2)]
    stored, scale = torch.stack([one for one, _ in made]), torch.stack([one for _, one in made if one is not None])
    found = vllm_kernels.to_marlin(chosen, stored, scale, torch.bfloat16)
    assert found.scale.dtype is torch.bfloat16
    bias = 2.0**-120 if name.startswith("fp8") else 1.0
    for i in range(2):
        scales = found.scale[i].double() * bias
        decoded = of_gptq(found.weight[i], found.type) * scales.repeat_interleave(256 // len(scales), 0).t()
        expected = chosen.dequantize(stored[i], scale[i], torch.float64)
        torch.testing.assert_close(decoded, expected, rtol=2**-8, atol=0)


def test_marlin_needs_whole_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_kernels, "_module", lambda path: Vllm())
    stored, scale = FORMATS["int4_group"].quantize(torch.randn(64, 192))
    assert scale is not None
    with pytest.raises(ValueError, match="Marlin: got 192 columns, must be a multiple of 128"):
        vllm_kernels.to_marlin(FORMATS["int4_group"], stored[None], scale[None], torch.bfloat16)


def test_a_variant_prepares_its_layers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []

    def prepare(i: int) -> Any:
        prepared.append(i)
        return lambda: torch.tensor(i)

    monkeypatch.setattr(vllm_kernels, "version", lambda name: f"0.26.0 of {name}")
    variant = vllm_kernels._variant("some", 3, prepare, lambda i: torch.tensor(i))
    assert (variant.name, variant.extra, prepared) == ("SwiGLU vLLM some", {"vllm": "0.26.0 of vllm"}, [])
    assert [int(variant.run(i)) for i in (2, 0, 2)] == [2, 0, 2]  # type: ignore[arg-type]
    assert prepared == [0, 1, 2]


def test_the_fastest_swiglu_may_be_one_of_vllm(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="the tables need pandas")

    def rows(*others: Row) -> str:
        write([row("mglu cuda", 10.0, case="fp8_row", extra={"chosen": True}), *others], tmp_path, "formats", "by it")
        return pages.TABLES["formats"](tmp_path)

    torch_only = row("SwiGLU torch._scaled_mm, compiled", 20.0, case="fp8_row")
    missing = row("SwiGLU vLLM", float("nan"), case="fp8_row", extra={"left_out": "vLLM is not installed"})
    assert "| 20.0 | 10.0, 0.50, 2.00x |" in rows(torch_only, missing)
    assert "| 15.0 | 10.0, 0.50, 1.50x |" in rows(torch_only, row("SwiGLU vLLM Marlin", 15.0, case="fp8_row"))


def test_experts_that_no_kernel_of_vllm_takes_have_no_ratio(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="the tables need pandas")
    refused = row("SwiGLU vLLM Marlin", float("nan"), 0, case="gpt-oss-20b", extra={"left_out": "refused"})
    write([row("mglu", 10.0, case="gpt-oss-20b", extra={"experts_in_use": 4.0}), refused], tmp_path, "experts_int4", "")
    assert pages.TABLES["experts_int4"](tmp_path).splitlines()[-1] == "| 1 | 4 |  | 10.0, 2.00x |"
