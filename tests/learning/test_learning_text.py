"""The text of the experiments about learning: documents, held-out packages and tokens."""

from __future__ import annotations

import gzip

import pytest

from benchmarks.learning import corpus
from tests.support.learning import VOCABULARY

pytest_plugins = ["tests.support.learning"]


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


def test_each_kind_of_several_is_held_out_for_itself(folder, tmp_path):
    from tokenizers import Tokenizer

    for i, path in enumerate(sorted(folder.glob("package*/file*.txt"))):
        for inner, suffix in (
            (f"usr/share/doc/RFC/standard/rfc{i}", ".txt.gz"),
            (f"usr/src/linux-source-6.1/fs/{i}/a", ".c"),
        ):
            place = tmp_path / f"{inner}{suffix}"
            place.parent.mkdir(parents=True, exist_ok=True)
            content = f"{suffix} ".join(path.read_text().splitlines(keepends=True)).encode()
            place.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    made = corpus.prepare(tmp_path / "made", ("rfc", "c"), vocabulary=VOCABULARY, debian=tmp_path)
    assert made.sizes.kind == "rfc+c"
    for name, count in made.sizes.parts["rfc"].items():
        assert count + made.sizes.parts["c"][name] == getattr(made.sizes, name)
        assert count > 0
    tokenizer = Tokenizer.from_file(str(tmp_path / "made" / "tokenizer.json"))
    for kind, tokens in made.held_out_parts.items():
        words = tokenizer.decode(tokens.tolist()).split()
        assert (".c" in words, ".txt.gz" in words) == (kind == "c", kind == "rfc")
        assert int(made.token_bytes[tokens.long()].sum()) == made.sizes.parts[kind]["held_out_bytes"]
    assert any(name.startswith("rfc") for name in made.sizes.held_out_packages)
    assert any(name.isdigit() for name in made.sizes.held_out_packages)


def test_too_little_text_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("a line of text that is long enough to count\n" * 3)
    with pytest.raises(ValueError, match=r"text: 1 documents of .* are too few to hold some out"):
        corpus.prepare(tmp_path / "out", text=tmp_path)


def test_bytes_of_packages_of_exact_versions_are_a_corpus(folder, tmp_path, monkeypatch, capsys):
    for path in folder.glob("package*/file*.txt"):
        place = tmp_path / "text" / "python" / path.parent.name / f"{path.stem}.py"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(path.read_text() + "\n# ä")
        place.with_suffix(".txt").write_text(f"{path.read_text()} is not Python")
    command = ["corpus", "--text", str(tmp_path / "text"), "--kind", "python", "--bytes", "--held-out", "0.02"]
    monkeypatch.setattr("sys.argv", [*command, "--out", str(tmp_path / "made")])
    corpus.main()
    made = corpus.load(tmp_path / "made")
    assert made.sizes.kind == "python"
    for name in ("train", "held_out"):
        tokens, size, files = getattr(made, name), *(getattr(made.sizes, f"{name}_{of}") for of in ("bytes", "files"))
        assert int(made.token_bytes[tokens.long()].sum()) == size == len(tokens) - files
        documents = bytes(tokens.tolist()).split(bytes([corpus.END_BYTE]))[:-1]
        assert len(documents) == files
        assert all(document.decode().endswith("# ä") for document in documents)
    assert 0.02e6 <= made.sizes.held_out_bytes < 0.03e6
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", [*command, "--out", str(tmp_path / "again"), "--digest", made.sizes.digest])
    corpus.main()
    assert f"digest: {made.sizes.digest}" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*command, "--out", str(tmp_path / "again"), "--digest", "another"])
    with pytest.raises(SystemExit, match=f"the corpus has the hash {made.sizes.digest}, must be another"):
        corpus.main()
