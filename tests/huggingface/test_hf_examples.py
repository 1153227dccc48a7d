"""The examples that use Transformers run at a small size, one after another, and print what they did."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import sys
from importlib.metadata import EntryPoint
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


def test_convert_swiglu(capsys: pytest.CaptureFixture[str]) -> None:
    run("convert_swiglu.py", "--size", "tiny", "--steps", "10", "--bytes", "50000", "--tokens", "2000")
    printed = capsys.readouterr().out
    assert "teacher: 10 steps took" in printed
    assert printed.count(": 2 steps took") == 2
    teacher, converted, trained_on, trained = losses(printed)
    assert abs(converted - teacher) < 0.02
    assert trained < teacher
    assert trained_on < teacher
    (errors,) = re.findall(r"^\| model\.layers\.0\.mlp \| (.*) \|$", printed, flags=re.MULTILINE)
    magnitude, *_, joint = map(float, errors.split(" | "))
    assert joint < 0.2 * magnitude
    folder = "build/examples/mglu-llama-converted"
    assert f"vllm serve {folder}\n" in printed
    assert is_frozen(folder)
    assert len(AutoTokenizer.from_pretrained(folder)) == 256


SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

if os.environ.get("BROKEN"):
    raise ValueError("no such architecture")

class Handler(BaseHTTPRequestHandler):
    def answer(self, body=b""):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        assert self.path == "/health"
        self.answer()

    def do_POST(self):
        assert self.path == "/v1/completions"
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["temperature"] == 0 and asked["model"] == sys.argv[sys.argv.index("--served-model-name") + 1]
        text = f" {sys.argv[1:3]}, {asked['max_tokens']} tokens, {os.environ['VLLM_HOST_IP']}"
        self.answer(json.dumps({"choices": [{"text": text}]}).encode())

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
"""A program in place of vLLM's command, which says how it was called."""


@pytest.fixture
def _with_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    plugin = EntryPoint("mglu_ops", "mglu_ops.vllm:register", "vllm.general_plugins")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [plugin])


@pytest.mark.usefixtures("_with_a_server")
def test_serve_vllm_trains_serves_and_asks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Any] = []

    def train_briefly(command: list[Any], check: bool) -> None:
        commands.append(command)
        train()

    shutil.rmtree("build", ignore_errors=True)
    monkeypatch.setattr("subprocess.run", train_briefly)
    run("serve_vllm.py", "--prompt", "def main(", "--steps", "7")
    printed = capsys.readouterr().out
    assert commands == [[sys.executable, EXAMPLES / "train_trainer.py"]]
    assert "vLLM serves build/examples/mglu-llama-frozen at http://127.0.0.1:" in printed
    assert "\ndef main( ['serve', 'build/examples/mglu-llama-frozen'], 7 tokens, 127.0.0.1\n" in printed
    run("serve_vllm.py", "--steps", "1")
    assert len(commands) == 1, "the model is there"


@pytest.mark.usefixtures("_with_a_server")
def test_serve_vllm_shows_why_a_server_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    train()
    monkeypatch.setenv("BROKEN", "1")
    with pytest.raises(SystemExit, match=r"(?s)ValueError: no such architecture.*its log is .*frozen\.vllm\.log"):
        run("serve_vllm.py")


def test_serve_vllm_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        SystemExit, match=r"vLLM is not installed in .*; mglu_ops/vllm/README\.md says how to install it"
    ):
        run("serve_vllm.py")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    with pytest.raises(SystemExit, match="mglu_ops is not installed, so that vLLM does not find its plugin"):
        run("serve_vllm.py")
    plugin = EntryPoint("mglu_ops", "mglu_ops.vllm:register", "vllm.general_plugins")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [plugin])
    with pytest.raises(SystemExit, match="--model: no model in nowhere; without this option, the example trains one"):
        run("serve_vllm.py", "--model", "nowhere")


@pytest.mark.parametrize("name", ["finetune_lora.py", "serve_generate.py"])
def test_a_missing_model_is_named(name: str) -> None:
    with pytest.raises(SystemExit, match="--model: no folder nowhere; run python"):
        run(name, "--model", "nowhere")


@pytest.mark.parametrize(
    "name",
    [
        "train_trainer.py",
        "finetune_lora.py",
        "convert_swiglu.py",
        "serve_generate.py",
        "serve_vllm.py",
        "local_text.py",
    ],
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
