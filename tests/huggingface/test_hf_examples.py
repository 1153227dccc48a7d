"""The examples that use Transformers run at a small size, one after another, and print what they did."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Olmo2ForCausalLM, pipeline

import mglu_ops.transformers as mt
from mglu_ops.transformers.configuration import ACTIVATIONS, MGLUBalanceConfigMixin
from tests.support.commands import snippets
from tests.support.hf_models import BY_NAME, MIXTURES, logits, mglus

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(autouse=True)
def _run_in_one_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(EXAMPLES)  # as `python examples/NAME.py` does


def run(name: str, *arguments: str) -> None:
    before = sys.argv
    sys.argv = [name, *arguments]
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.argv = before


def losses(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"(\d+\.\d+) (?:-> |nats a byte)", printed)]


def train() -> None:
    if not Path("build/examples/mglu-llama").is_dir():
        run("train_trainer.py", "--size", "tiny", "--steps", "5", "--bytes", "50000")


def is_frozen(folder: str) -> bool:
    return all(mglu.packed_masks is not None for mglu in mglus(AutoModelForCausalLM.from_pretrained(folder)))


def test_train_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    train()
    printed = capsys.readouterr().out
    before, after = losses(printed)
    assert after < before - 0.1
    assert "5 steps took" in printed
    assert not is_frozen("build/examples/mglu-llama")
    assert is_frozen("build/examples/mglu-llama-frozen")


def test_what_is_written_has_the_tokenizer_that_it_was_trained_with() -> None:
    from local_text import decode, encode

    train()
    text = "def main(x):\n\treturn 'café' + \"\u2192 \U0001f600\"  # Āā\r\n\x7f\x01"
    for name in ("build/examples/mglu-llama", "build/examples/mglu-llama-frozen"):
        tokenizer = AutoTokenizer.from_pretrained(name)
        tokens = tokenizer(text, return_tensors="pt").input_ids[0]
        assert torch.equal(tokens, encode(text))
        assert tokenizer.decode(tokens) == decode(tokens) == text
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (0, 0, 256)
        generate = pipeline("text-generation", name)
        assert generate("def main(", max_new_tokens=3, do_sample=False)[0]["generated_text"].startswith("def main(")
        config = AutoConfig.from_pretrained(name)
        assert config.head_dim in (32, 64, 80, 96, 112, 128, 160, 192, 224, 256), "what vLLM takes on a CPU"


def test_finetune_lora(capsys: pytest.CaptureFixture[str]) -> None:
    train()
    capsys.readouterr()
    run("finetune_lora.py", "--steps", "3", "--bytes", "30000")
    printed = capsys.readouterr().out
    before, after = losses(printed)
    assert after < before
    assert "trainable params" in printed
    assert is_frozen("build/examples/mglu-llama-manual-frozen")


def test_serve_generate(capsys: pytest.CaptureFixture[str]) -> None:
    train()
    capsys.readouterr()
    run("serve_generate.py", "--steps", "5", "--prompt", "def main(", "--batch", "2")
    printed = capsys.readouterr().out
    assert "second call:" in printed
    assert "2 sequences of 5 new tokens" in printed
    assert "\ndef main(" in printed
    run("serve_generate.py", "--steps", "2", "--model", "build/examples/mglu-llama")
    assert "packed the masks" in capsys.readouterr().out


def test_distill_from_swiglu(capsys: pytest.CaptureFixture[str]) -> None:
    run("distill_from_swiglu.py", "--size", "tiny", "--steps", "5", "--bytes", "50000")
    printed = capsys.readouterr().out
    assert printed.count("5 steps took") == 2
    assert len(losses(printed)) == 3
    assert is_frozen("build/examples/mglu-llama-distilled")


@pytest.mark.parametrize("name", ["finetune_lora.py", "serve_generate.py"])
def test_a_missing_model_is_named(name: str) -> None:
    with pytest.raises(SystemExit, match="--model: no folder nowhere; run python"):
        run(name, "--model", "nowhere")


@pytest.mark.parametrize(
    "name", ["train_trainer.py", "finetune_lora.py", "distill_from_swiglu.py", "serve_generate.py", "local_text.py"]
)
def test_examples_are_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 120


PAGE = Path(mt.__file__).with_name("README.md").read_text()


def test_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    found = snippets(PAGE, "python")
    assert len(found) == 8
    for snippet in found:
        exec(compile(snippet, "README.md", "exec"), names)
    assert names["tokens"].shape == (1, 24 + 8)
    assert all(mglu.packed_masks is not None and mglu.weight_format == "fp8_row" for mglu in mglus(names["model"]))
    assert names["mixture"](names["text"]).logits.shape == (32, 24, 256)
    assert type(names["student"]) is type(names["again"]) is Olmo2ForCausalLM
    assert torch.equal(logits(names["student"]), logits(names["again"]))


def test_tables_name_every_architecture_and_key() -> None:
    for name, architecture in BY_NAME.items():
        layers = "experts" if name in MIXTURES else "dense"
        assert f"\n| `{architecture.swiglu[1].__name__}` | `mglu_{name}` | {layers}" in PAGE
    for key in MGLUBalanceConfigMixin.__dataclass_fields__:
        assert f"| `{key}` |" in PAGE
    line = re.search(r"`hidden_act` is one of (.*?)\.", PAGE, flags=re.DOTALL)
    assert line is not None
    assert set(re.findall(r"\w+", line.group(1))) - {"and"} == set(ACTIVATIONS)
