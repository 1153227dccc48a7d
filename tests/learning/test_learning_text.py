"""The text of the experiments about learning: documents, held-out packages and tokens."""

from __future__ import annotations

import gzip

import pytest
import torch
from learning_fixtures import VOCABULARY

from benchmarks.learning import corpus

pytest_plugins = ["learning_fixtures"]


def test_documents_are_text_without_duplicates(folder):
    documents = corpus.read(corpus.files([folder], corpus.ANY_SUFFIX))
    assert len(documents) == 3 * 40 + 40  # copies that differ in white space count once
    assert len({document.digest for document in documents}) == len(documents)
    assert all(document.text.isprintable() or "\n" in document.text for document in documents)


def test_packages_are_held_out_as_a_whole_and_unseen(folder):
    documents = corpus.read(corpus.files([folder], corpus.ANY_SUFFIX))
    train_text, held_out = corpus.divide(documents)
    assert not {document.package for document in train_text} & {document.package for document in held_out}
    size = sum(document.size for document in held_out)
    assert 0 < size < 0.2 * sum(document.size for document in train_text)
    lines = {line for document in train_text for line in document.text.splitlines()}
    for document in held_out:
        own = document.text.splitlines()
        assert sum(line in lines for line in own) <= 0.5 * len(own)


def test_a_folder_inside_another_is_searched_once(tmp_path):
    inner = tmp_path / "site-packages"
    (inner / "one").mkdir(parents=True)
    (inner / "one" / "a.py").touch()
    (tmp_path / "b.py").touch()
    found = list(corpus.files([tmp_path, inner], (".py",)))
    assert found == [("b", tmp_path / "b.py"), ("one", inner / "one" / "a.py")]


def test_tokens_stand_for_the_text(folder, tmp_path):
    from tokenizers import Tokenizer

    found = corpus.prepare(tmp_path / "made", text=folder, vocabulary=VOCABULARY)
    tokenizer = Tokenizer.from_file(str(tmp_path / "made" / "tokenizer.json"))
    documents = corpus.read(corpus.files([folder], corpus.ANY_SUFFIX))
    expected = {document.text for document in corpus.divide(documents)[0]}
    end = tokenizer.token_to_id(corpus.END)
    ends = (found.train == end).nonzero().flatten().tolist()
    texts = [
        tokenizer.decode(found.train[start:stop].tolist())
        for start, stop in zip([0, *(i + 1 for i in ends[:-1])], ends, strict=True)
    ]
    assert set(texts) == expected
    assert int(found.token_bytes[found.train.long()].sum()) == found.sizes.train_bytes
    again = corpus.prepare(tmp_path / "made", text=tmp_path / "gone")  # the corpus is not collected again
    assert again.sizes == found.sizes


def test_the_training_text_may_be_limited(folder, tmp_path):
    whole, part = (
        corpus.prepare(tmp_path / str(m), text=folder, vocabulary=VOCABULARY, megabytes=m) for m in (1, 0.03)
    )
    assert part.sizes.train_bytes <= 30_000 < whole.sizes.train_bytes
    assert part.sizes.train_bytes > 25_000
    assert part.sizes.held_out_bytes > 0
    assert part.sizes.digest != whole.sizes.digest
    again = corpus.prepare(tmp_path / "again", text=folder, vocabulary=VOCABULARY, megabytes=1)
    assert again.sizes == whole.sizes
    assert torch.equal(again.train, whole.train)


def test_english_text_has_manual_pages_and_the_topics_of_python(tmp_path, monkeypatch):
    (tmp_path / "man1").mkdir()
    (tmp_path / "de" / "man1").mkdir(parents=True)
    for path in ("man1/one.1.gz", "man1/two.1.gz", "de/man1/one.1.gz"):
        (tmp_path / path).write_bytes(gzip.compress(path.encode() * 20))
    (tmp_path / "lib" / "pydoc_data").mkdir(parents=True)
    (tmp_path / "lib" / "pydoc_data" / "topics.py").touch()
    (tmp_path / "lib" / "pydoc_data" / "module.py").touch()
    monkeypatch.setattr(corpus, "MANUAL", tmp_path)
    assert tmp_path / "man1" not in corpus.roots()
    assert {tmp_path / "man1", *corpus.roots()} == set(corpus.roots("english"))
    found = dict(corpus.files([tmp_path / "man1", tmp_path / "lib"], corpus.SUFFIXES["english"]))
    assert found.keys() == {"one.1.gz", "two.1.gz", "pydoc_data"}  # each page is a package
    assert found["pydoc_data"].name == "topics.py"
    documents = corpus.read((name, found[name]) for name in ("one.1.gz", "two.1.gz"))
    assert {document.text for document in documents} == {"man1/one.1.gz" * 20, "man1/two.1.gz" * 20}


def test_too_little_text_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("a line of text that is long enough to count\n" * 3)
    with pytest.raises(ValueError, match="text: 1 documents are too few to hold some out"):
        corpus.prepare(tmp_path / "out", text=tmp_path)
