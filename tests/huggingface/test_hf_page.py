"""The snippets of mglu_ops/transformers/README.md run in order, and give what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import BY_NAME, MIXTURES, logits, mglus
from processes import snippets
from transformers import Olmo2ForCausalLM

import mglu_ops.transformers as mt
from mglu_ops.transformers.configuration import ACTIVATIONS, MGLUBalanceConfigMixin

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
