"""A small text and tiny models, for tests of the learning experiments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.decoder import Sizes
from benchmarks.learning import corpus, recipe, schedule
from benchmarks.learning.recipe import Recipe
from benchmarks.records import read_table

VOCABULARY = 300
TINY = Sizes(layers=2, hidden=16, intermediate=32, heads=2, kv_heads=2, vocabulary=VOCABULARY, context=16)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A folder with the texts of 40 packages, including duplicates and binary files."""
    root = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefgh"), 5)) for _ in range(50)]
    for package in range(40):
        (root / f"package{package}").mkdir()
        for i in range(3):
            lines = [" ".join(random.choice(words, 6)) for _ in range(20)]
            (root / f"package{package}" / f"file{i}.txt").write_text("\n".join(lines))
    original = (root / "package0" / "file0.txt").read_text()
    for package in range(40):
        (root / f"package{package}" / "copy.txt").write_text(original.replace("\n", "\n\n"))
        (root / f"package{package}" / "almost.txt").write_text(original + f"\nand a line of package {package}")
    (root / "package0" / "bytes").write_bytes(bytes(range(256)))
    (root / "package0" / "short").write_text("short")
    return root


@pytest.fixture(scope="session")
def prepared(folder, tmp_path_factory) -> Path:
    """The folder of a corpus made from the text."""
    made = tmp_path_factory.mktemp("corpus")
    corpus.prepare(made, text=folder, vocabulary=VOCABULARY)
    return made


@pytest.fixture(scope="session")
def text(prepared) -> corpus.Corpus:
    return corpus.load(prepared)


@pytest.fixture
def tiny(monkeypatch) -> Iterator[None]:
    monkeypatch.setitem(recipe.SIZES, "25M", TINY)
    monkeypatch.setattr(schedule, "SEQUENCES", 4)
    monkeypatch.setattr(schedule, "CONTEXT", 16)
    monkeypatch.setattr(schedule, "EVALUATIONS", 4)
    yield
    torch._dynamo.reset()


def rows_of(folder: Path, one: Recipe) -> list[dict[str, str]]:
    """The curve of a finished run, without its seconds."""
    return [{**row, "seconds": ""} for row in read_table(folder / f"{one.name}.csv")[1]]


def tiny_run(text: corpus.Corpus, steps: int, **options: object) -> Recipe:
    """A recipe of about `steps` steps."""
    share = text.sizes.train_tokens / text.sizes.train_bytes
    return Recipe(**{"lr": 1e-2, "megabytes": steps * 4 * 16 / share / 1e6, **options})
