"""Text to learn from: collected on this machine, de-duplicated, divided into training and held-out text, and tokenised.

python -m benchmarks.learning.corpus --out DIR [--kind english] [--text FOLDER] [--megabytes 100]

The default text is what every machine with the requirements has, the Python sources of the installed packages; the kind
`english` is the prose beside them, and the manual pages. Packages (each manual page is one) are held out as a whole. Of
them, files that occur in another package too, or most of whose lines do, are left out, so that nothing held out was
seen in training. Of more than 100 MB, a random part is taken, as for the committed results; `--megabytes inf` takes
all. Nothing of the text is committed; its hash and sizes go with the results.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import site
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.records import write_whole

SUFFIXES = {
    "python": (".py",),
    "english": (".rst", ".md", ".txt", "pydoc_data/topics.py", *(f".{i}.gz" for i in range(1, 9))),
}
"""The endings of the paths of each kind of text. The last are manual pages."""
MANUAL = Path("/usr/share/man")
"""The folder of the manual pages, whose subfolders `man1` to `man8` are in English."""
ANY_SUFFIX = ("",)

VOCABULARY = 8192
END = "<|end|>"
"""The token between two documents, which stands for no bytes."""
LARGEST_FILE = 1 << 20
"""Bytes of a file beyond which it is left out: such files are mostly tables that a program wrote."""
TOKENIZER_BYTES = 32 << 20
"""Bytes of training text that the tokenizer is trained on."""

HELD_OUT = 0.02
"""The fraction of the text that is held out, about."""
MOST_HELD_OUT = 2_500_000
"""Bytes of held-out text that are enough: every run evaluates all of it several times."""
LARGEST_HELD_OUT = 0.25
"""The largest package that is held out, as a fraction of all held-out text, unless all packages are larger."""
COMMON_LINES = 0.5
"""The fraction of a held-out file's lines that training text has too, beyond which the file is left out."""
SHORTEST_LINE = 20
"""Characters of a line below which it may occur anywhere by chance."""


class Document(NamedTuple):
    """A file, and the package that it belongs to."""

    package: str
    text: str

    @property
    def digest(self) -> bytes:
        """The hash of the text without regard to white space."""
        return hashlib.sha256(" ".join(self.text.split()).encode()).digest()

    @property
    def size(self) -> int:
        return len(self.text.encode())


@dataclass(frozen=True)
class Sizes:
    """What a corpus consists of.

    Attributes:
        kind: the kind of text, or the name of the folder that it was read from.
        digest: the first 16 digits of a hash of all tokens, of how they are divided, and of the tokenizer.
        train_bytes: bytes of the training text.
        train_tokens: its tokens.
        train_files: its documents.
        held_out_bytes: bytes of the held-out text.
        held_out_tokens: its tokens.
        held_out_files: its documents.
        held_out_packages: the packages that are held out.
    """

    kind: str
    digest: str
    train_bytes: int
    train_tokens: int
    train_files: int
    held_out_bytes: int
    held_out_tokens: int
    held_out_files: int
    held_out_packages: list[str]


@dataclass(frozen=True)
class Corpus:
    """Tokenised text.

    Attributes:
        sizes: what it consists of.
        train: the tokens of the training text, uint16 `[train_tokens]`.
        held_out: the tokens of the held-out text, uint16 `[held_out_tokens]`.
        token_bytes: the bytes that each token stands for, int64 `[vocabulary]`.
    """

    sizes: Sizes
    train: Tensor
    held_out: Tensor
    token_bytes: Tensor


# --- Files ----------------------------------------------------------------------------------------------------------


def roots(kind: str = "python") -> list[Path]:
    """The folders of Python's own modules and of the installed packages, in a virtual environment also the others.

    For `english`, also those of the manual pages.
    """
    stdlib = sysconfig.get_path("stdlib")
    found = [stdlib, f"{stdlib}/site-packages", sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found += [*site.getsitepackages(), "/usr/lib/python3/dist-packages"]
    manual = [MANUAL / f"man{section}" for section in range(1, 9)] if kind == "english" else []
    return [path for path in [*map(Path, dict.fromkeys(found)), *manual] if path.is_dir()]


def files(folders: Sequence[Path], suffixes: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield the files of some folders, with the name of their package: the first part of their path in the folder.

    A folder inside another one that is searched, as `site-packages` is inside Python's own, is searched once.
    """
    resolved = [folder.resolve() for folder in folders]
    for folder in resolved:
        nested = [other for other in resolved if folder in other.parents]
        for path in sorted(folder.rglob("*")):
            is_wanted = path.as_posix().endswith(tuple(suffixes)) and path.is_file() and not path.is_symlink()
            if is_wanted and not any(other in path.parents for other in nested):
                yield path.relative_to(folder).parts[0].removesuffix(".py"), path


def read(paths: Iterable[tuple[str, Path]]) -> list[Document]:
    """The documents of files that are UTF-8 text of a reasonable size, without duplicates, in the order of hashes."""
    found: dict[bytes, Document] = {}
    for package, path in paths:
        try:
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            if not 64 <= len(content) <= LARGEST_FILE:
                continue
            document = Document(package, content.decode())
        except (OSError, EOFError, UnicodeDecodeError):
            continue
        found.setdefault(document.digest, document)
    return [document for _, document in sorted(found.items())]


# --- Training and held-out text -------------------------------------------------------------------------------------


def divide(documents: Sequence[Document], most: float = float("inf")) -> tuple[list[Document], list[Document]]:
    """Divide documents into training text and held-out text, by packages.

    Args:
        documents: all documents, without duplicates.
        most: bytes of training text; documents beyond it are left out.
    """
    sizes: dict[str, int] = {}
    for document in documents:
        sizes[document.package] = sizes.get(document.package, 0) + document.size
    wanted, chosen, taken = min(HELD_OUT * min(sum(sizes.values()), most), MOST_HELD_OUT), set[str](), 0
    largest = max(LARGEST_HELD_OUT * wanted, min(sizes.values(), default=0))
    for package in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if taken >= wanted:
            break
        if sizes[package] <= largest:
            chosen.add(package)
            taken += sizes[package]
    train = [document for document in documents if document.package not in chosen]
    ends = accumulate(document.size for document in train)
    train = [document for document, end in zip(train, ends, strict=True) if end <= most]
    seen = {line for document in train for line in long_lines(document)}
    held_out = [document for document in documents if document.package in chosen and _is_new(document, seen)]
    return train, held_out


def long_lines(document: Document) -> list[int]:
    """The hashes of the lines that are long enough to be characteristic."""
    stripped = (line.strip() for line in document.text.splitlines())
    return [hash(line) for line in stripped if len(line) >= SHORTEST_LINE]


def _is_new(document: Document, seen: set[int]) -> bool:
    lines = long_lines(document)
    return bool(lines) and sum(line in seen for line in lines) <= COMMON_LINES * len(lines)


# --- Tokens ---------------------------------------------------------------------------------------------------------


def train_tokenizer(documents: Sequence[Document], vocabulary: int = VOCABULARY) -> Any:
    """Train a byte-level byte-pair encoding on documents spread evenly over the given ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    total = sum(document.size for document in documents)
    every = max(1, total // TOKENIZER_BYTES)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((document.text for document in documents[::every]), trainer)
    return tokenizer


def encode(tokenizer: Any, documents: Sequence[Document], batch: int = 512) -> NDArray[np.uint16]:
    """The tokens of all documents, each followed by END, uint16."""
    end = tokenizer.token_to_id(END)
    found = []
    for start in range(0, len(documents), batch):
        texts = [document.text for document in documents[start : start + batch]]
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            found.append(np.array([*encoding.ids, end], dtype=np.uint16))
    return np.concatenate(found)


def bytes_of_tokens(tokenizer: Any) -> list[int]:
    """The number of bytes that each token stands for. In a byte-level encoding a token has a character for each."""
    vocabulary = tokenizer.get_vocab()
    return [0 if token == END else len(token) for token in sorted(vocabulary, key=vocabulary.__getitem__)]


# --- A corpus in a folder -------------------------------------------------------------------------------------------


def prepare(
    out: Path,
    kind: str = "python",
    text: Path | None = None,
    vocabulary: int = VOCABULARY,
    megabytes: float = float("inf"),
) -> Corpus:
    """Collect and tokenise text into a folder; a folder that holds a corpus is used as it is.

    Args:
        out: the folder.
        kind: a key of SUFFIXES.
        text: a folder of text to use instead of what the machine has: every file in it that is UTF-8 text.
        vocabulary: the number of tokens.
        megabytes: the most training text, in 10^6 bytes: of more, a random part is taken.

    Raises:
        ValueError: there is too little text to hold some of it out.
    """
    if not (out / "corpus.json").is_file():
        name = kind if text is None else text.name
        documents = read(files(roots(kind), SUFFIXES[kind]) if text is None else files([text], ANY_SUFFIX))
        train, held_out = divide(documents, megabytes * 1e6)
        if not train or not held_out:
            raise ValueError(
                f"text: {len(documents)} documents are too few to hold some out; they must come from several packages "
                "or folders"
            )
        _write(out, name, train, held_out, vocabulary)
    return load(out)


def _write(out: Path, kind: str, train: Sequence[Document], held_out: Sequence[Document], vocabulary: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(train, vocabulary)
    tokens = {"train": encode(tokenizer, train), "held_out": encode(tokenizer, held_out)}
    digest = hashlib.sha256(tokenizer.to_str().encode())
    for ids in tokens.values():
        digest.update(hashlib.sha256(ids.tobytes()).digest())
    sizes = Sizes(
        kind=kind,
        digest=digest.hexdigest()[:16],
        train_bytes=sum(document.size for document in train),
        train_tokens=len(tokens["train"]),
        train_files=len(train),
        held_out_bytes=sum(document.size for document in held_out),
        held_out_tokens=len(tokens["held_out"]),
        held_out_files=len(held_out),
        held_out_packages=sorted({document.package for document in held_out}),
    )
    for name, ids in tokens.items():
        np.save(out / f"{name}.npy", ids)
    tokenizer.save(str(out / "tokenizer.json"))
    about = json.dumps({"sizes": asdict(sizes), "token_bytes": bytes_of_tokens(tokenizer)}, indent=1)
    # Written last: a folder that has it is complete.
    write_whole(out / "corpus.json", lambda path: path.write_text(about))


def load(folder: Path) -> Corpus:
    """The corpus in a folder."""
    found = json.loads((folder / "corpus.json").read_text())
    train, held_out = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("train", "held_out"))
    return Corpus(Sizes(**found["sizes"]), train, held_out, torch.tensor(found["token_bytes"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=list(SUFFIXES), default="python")
    parser.add_argument("--text", type=Path, metavar="FOLDER", help="a folder of text to use instead")
    parser.add_argument("--megabytes", type=float, default=100.0, help="the most training text (default: 100)")
    arguments = parser.parse_args()
    corpus = prepare(arguments.out, arguments.kind, arguments.text, megabytes=arguments.megabytes)
    for name, value in asdict(corpus.sizes).items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
