"""Collects text on this machine, removes duplicates, divides it into training and held-out text, and tokenises it.

python -m benchmarks.learning.corpus --out DIR [--kind python rfc c] [--text FOLDER] [--megabytes 100] [--bytes]

The default kind of text, `python`, is the Python sources of the installed packages, which every machine with the
requirements has. `english` is the prose in these packages, and the manual pages. Two kinds are Debian packages,
unpacked in `--debian`: `rfc` is the text files of doc-rfc, and `c` the C sources of linux-source-6.1. Several kinds are
one corpus: each step reads a random mixture, and each kind has its own held-out text.

To make the same text again later, use packages of exact versions: `--text FOLDER --kind python` reads the packages in
`FOLDER/python` instead of the installed packages, and `--digest` refuses a corpus with another hash. With `--bytes`,
each byte is a token, so that the hash depends on nothing but the text.

Packages are held out as a whole. A manual page or an RFC counts as a package. In the sources of Linux, each folder or
file of the second level is a package. In `FOLDER/python`, each folder or file of the fourth level is a package, because
losses on hundreds of small packages differ less between seeds than losses on a few large ones. Held-out files are
dropped if another package has the same file, or if training text has most of their lines. A kind with more than 100 MB
is subsampled at random, as for the committed results; `--megabytes inf` takes all of it. The text is not committed; the
results name its hash and its sizes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import site
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
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
    "rfc": (".txt", ".txt.gz"),
    "c": (".c",),
}
"""Kind of text -> endings of its paths; `.1.gz` to `.8.gz` are manual pages. Headers of C are left out, because many of
them are tables."""
MANUAL = Path("/usr/share/man")
"""The folder of the manual pages; its subfolders `man1` to `man8` are in English."""
DEBIAN = {"rfc": "usr/share/doc/RFC", "c": "usr/src/linux-source-6.1"}
"""Kind of text that is a Debian package -> the folder of its files."""
ANY_SUFFIX = ("",)
DEPTH = 4
"""With `--text`, files whose paths below the folder of a kind begin with the same 4 parts are one package: the folder
of a wheel, and three levels inside it."""

VOCABULARY = 8192
END = "<|end|>"
"""The token after each document. It stands for no bytes of text."""
BYTES = 256
"""The size of the vocabulary if tokens are bytes."""
END_BYTE = 255
"""The token after each document if tokens are bytes; no byte of UTF-8 has this value."""
LARGEST_FILE = 1 << 20
"""The largest file that is read, in bytes; larger files are mostly tables that a program wrote."""
TOKENIZER_BYTES = 32 << 20
"""About how many bytes of training text the tokenizer is trained on."""

HELD_OUT = 0.02
"""The approximate fraction of the text that is held out."""
MOST_HELD_OUT = 2_500_000
"""The most held-out text of all kinds, in bytes. It is limited, because every run evaluates it several times."""
LARGEST_HELD_OUT = 0.25
"""Packages larger than this fraction of all held-out text are not held out, unless all packages are larger."""
COMMON_LINES = 0.5
"""Held-out files are dropped if training text has a larger fraction of their lines."""
SHORTEST_LINE = 20
"""The shortest line, in characters, that counts as common to two files; shorter lines occur anywhere by chance."""


class Document(NamedTuple):
    """A file, and the package that it belongs to."""

    package: str
    text: str

    @property
    def digest(self) -> bytes:
        """The hash of the text with every run of white space replaced by one space."""
        return hashlib.sha256(" ".join(self.text.split()).encode()).digest()

    @property
    def size(self) -> int:
        return len(self.text.encode())


@dataclass(frozen=True)
class Sizes:
    """What a corpus consists of: the sizes of the training text and of the held-out text, and its packages.

    Attributes:
        kind: the kinds of text, joined by "+", or the name of the folder from which the text was read.
        digest: the first 16 digits of a hash of all tokens, of how they are divided, and of the tokenizer.
        parts: kind of text -> the numeric fields above for this kind; empty if there is only one kind.
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
    parts: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Corpus:
    """Tokenised text.

    Attributes:
        sizes: what the text consists of.
        train: the tokens of the training text, uint16 `[train_tokens]`.
        held_out: the tokens of the held-out text, uint16 `[held_out_tokens]`.
        token_bytes: the bytes that each token stands for, int64 `[vocabulary]`.
    """

    sizes: Sizes
    train: Tensor
    held_out: Tensor
    token_bytes: Tensor

    @property
    def held_out_parts(self) -> dict[str, Tensor]:
        """The held-out tokens of each kind of text."""
        parts = {kind: sizes["held_out_tokens"] for kind, sizes in self.sizes.parts.items()}
        parts = parts or {self.sizes.kind: self.sizes.held_out_tokens}
        return dict(zip(parts, self.held_out.split(list(parts.values())), strict=True))


def roots(kind: str = "python", debian: Path = Path("/")) -> list[Path]:
    """The folders of Python's modules and of all installed packages, including packages outside a virtual environment.

    `english` adds the folders of the manual pages. For `rfc` and `c`, the result is folders of the Debian packages that
    are unpacked in `debian`.
    """
    if kind in DEBIAN:
        top = debian / DEBIAN[kind]
        below = top.rglob("*") if kind == "rfc" else top.glob("*")
        return sorted(path for path in [top, *below] if path.is_dir() and not path.is_symlink())
    stdlib = sysconfig.get_path("stdlib")
    found = [stdlib, f"{stdlib}/site-packages", sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found += [*site.getsitepackages(), "/usr/lib/python3/dist-packages"]
    manual = [MANUAL / f"man{section}" for section in range(1, 9)] if kind == "english" else []
    return [path for path in [*map(Path, dict.fromkeys(found)), *manual] if path.is_dir()]


def files(folders: Sequence[Path], suffixes: Sequence[str], depth: int = 1) -> Iterator[tuple[str, Path]]:
    """Yield the package and path of each file in some folders. A package is the first `depth` parts of a relative path.

    A folder inside another folder of the list, such as `site-packages` inside Python's own, is searched once.
    """
    resolved = [folder.resolve() for folder in folders]
    for folder in resolved:
        nested = [other for other in resolved if folder in other.parents]
        for path in sorted(folder.rglob("*")):
            is_wanted = path.as_posix().endswith(tuple(suffixes)) and path.is_file() and not path.is_symlink()
            if is_wanted and not any(other in path.parents for other in nested):
                yield "/".join(path.relative_to(folder).parts[:depth]).removesuffix(".py"), path


def read(paths: Iterable[tuple[str, Path]]) -> list[Document]:
    """Read UTF-8 files of 64 bytes to `LARGEST_FILE`, without duplicates, in the order of their hashes."""
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


def divide(
    documents: Sequence[Document],
    most: float = float("inf"),
    most_held_out: float = MOST_HELD_OUT,
    share: float = HELD_OUT,
) -> tuple[list[Document], list[Document]]:
    """Divide documents into training text and held-out text, by packages.

    Args:
        documents: all documents, without duplicates.
        most: the most training text, in bytes.
        most_held_out: approximately the most held-out text, in bytes.
        share: the approximate fraction of the text that is held out, unless `most_held_out` is less.
    """
    sizes: dict[str, int] = {}
    for document in documents:
        sizes[document.package] = sizes.get(document.package, 0) + document.size
    wanted, chosen, taken = min(share * min(sum(sizes.values()), most), most_held_out), set[str](), 0
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
    held_out = []
    for document in (one for one in documents if one.package in chosen):
        lines = long_lines(document)
        if lines and sum(line in seen for line in lines) <= COMMON_LINES * len(lines):
            held_out.append(document)
    return train, held_out


def long_lines(document: Document) -> list[int]:
    """The hashes of the lines with at least SHORTEST_LINE characters."""
    stripped = (line.strip() for line in document.text.splitlines())
    return [hash(line) for line in stripped if len(line) >= SHORTEST_LINE]


def train_tokenizer(documents: Sequence[Document], vocabulary: int = VOCABULARY) -> Any:
    """Train a byte-level byte-pair encoding on every n-th document, about `TOKENIZER_BYTES` of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    every = max(1, sum(document.size for document in documents) // TOKENIZER_BYTES)
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
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        found += [np.array([*encoding.ids, end], dtype=np.uint16) for encoding in encodings]
    return np.concatenate(found)


def encode_bytes(documents: Sequence[Document]) -> NDArray[np.uint16]:
    """The bytes of all documents, each followed by END_BYTE, uint16."""
    whole = b"".join(document.text.encode() + bytes([END_BYTE]) for document in documents)
    return np.frombuffer(whole, np.uint8).astype(np.uint16)


def bytes_of_tokens(tokenizer: Any) -> list[int]:
    """The number of bytes that each token stands for: a byte-level encoding writes each byte as one character."""
    vocabulary = tokenizer.get_vocab()
    return [0 if token == END else len(token) for token in sorted(vocabulary, key=vocabulary.__getitem__)]


def collect(kinds: Sequence[str] | None, text: Path | None, debian: Path) -> dict[str, Iterable[tuple[str, Path]]]:
    """The files of each kind of text, as `files` yields them; `prepare` explains the arguments."""
    if kinds is None and text is not None:
        return {text.name: files([text], ANY_SUFFIX)}
    found: dict[str, Iterable[tuple[str, Path]]] = {}
    for kind in kinds or ["python"]:
        is_own = text is not None and (text / kind).is_dir()
        folders, depth = ([text / kind], DEPTH) if text is not None and is_own else (roots(kind, debian), 1)
        found[kind] = files(folders, SUFFIXES[kind], depth)
    return found


def prepare(
    out: Path,
    kinds: Sequence[str] | None = None,
    text: Path | None = None,
    vocabulary: int = VOCABULARY,
    megabytes: float = float("inf"),
    debian: Path = Path("/"),
    held_out: float | None = None,
) -> Corpus:
    """Collect and tokenise text into a folder, unless the folder already holds a corpus.

    Args:
        out: the folder.
        kinds: keys of SUFFIXES; None for `python`, or for every file in `text` that is UTF-8 text.
        text: a folder to read instead of the installed text. With `kinds`, the packages of a kind are in the subfolder
            with its name; kinds without a subfolder are read where they are installed.
        vocabulary: the size of the vocabulary; `BYTES` if each byte is a token.
        megabytes: the most training text of a kind, in 10^6 bytes; more text is subsampled at random.
        debian: the folder in which the Debian packages of `rfc` and `c` are unpacked.
        held_out: the held-out text of all kinds, in 10^6 bytes, before files that resemble training text are dropped.
            None for 2% of the text, at most 2.5.

    Raises:
        ValueError: there is too little text of a kind to hold some of it out.
    """
    if (out / "corpus.json").is_file():
        return load(out)
    found = collect(kinds, text, debian)
    most_held_out = MOST_HELD_OUT if held_out is None else held_out * 1e6
    divided: dict[str, dict[str, list[Document]]] = {}
    for kind, paths in found.items():
        documents = read(paths)
        share = HELD_OUT if held_out is None else 1.0
        both = divide(documents, megabytes * 1e6, most_held_out / len(found), share)
        if not all(both):
            raise ValueError(
                f"text: {len(documents)} documents of {kind} are too few to hold some out; they must come from several "
                "packages or folders"
            )
        divided[kind] = dict(zip(("train", "held_out"), both, strict=True))
    out.mkdir(parents=True, exist_ok=True)
    digest, token_bytes, encoded = hashlib.sha256(), [1] * END_BYTE + [0], encode_bytes
    if vocabulary != BYTES:
        tokenizer = train_tokenizer([one for parts in divided.values() for one in parts["train"]], vocabulary)
        tokenizer.save(str(out / "tokenizer.json"))
        digest.update(tokenizer.to_str().encode())
        token_bytes, encoded = bytes_of_tokens(tokenizer), partial(encode, tokenizer)
    sizes: dict[str, dict[str, int]] = {kind: {} for kind in divided}
    for name in ("train", "held_out"):
        tokens = {kind: encoded(parts[name]) for kind, parts in divided.items()}
        whole = np.concatenate([*tokens.values()])
        np.save(out / f"{name}.npy", whole)
        digest.update(hashlib.sha256(whole.tobytes()).digest())
        for kind, parts in divided.items():
            counts = sum(one.size for one in parts[name]), len(tokens[kind]), len(parts[name])
            sizes[kind] |= {f"{name}_{what}": n for what, n in zip(("bytes", "tokens", "files"), counts, strict=True)}
    about = Sizes(
        kind="+".join(sizes),
        digest=digest.hexdigest()[:16],
        **{name: sum(one[name] for one in sizes.values()) for name in next(iter(sizes.values()))},
        held_out_packages=sorted({one.package for parts in divided.values() for one in parts["held_out"]}),
        parts=sizes if len(sizes) > 1 else {},
    )
    content = json.dumps({"sizes": asdict(about), "token_bytes": token_bytes}, indent=1)
    # This file is written last, so a folder that has it is complete.
    write_whole(out / "corpus.json", lambda path: path.write_text(content))
    return load(out)


def load(folder: Path) -> Corpus:
    """The corpus in a folder."""
    found = json.loads((folder / "corpus.json").read_text())
    train, held_out = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("train", "held_out"))
    return Corpus(Sizes(**found["sizes"]), train, held_out, torch.tensor(found["token_bytes"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", nargs="+", choices=list(SUFFIXES), help="kinds of text (default: python)")
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FOLDER",
        help="a folder of text to use instead: all of it, or with --kind the subfolders with the names of the kinds",
    )
    parser.add_argument(
        "--megabytes", type=float, default=100.0, help="the most training text of a kind (default: 100)"
    )
    parser.add_argument(
        "--debian", type=Path, default="/", help="the folder in which Debian's packages are unpacked (default: /)"
    )
    parser.add_argument(
        "--held-out", type=float, metavar="MEGABYTES", help="the held-out text (default: 2%% of the text, at most 2.5)"
    )
    parser.add_argument("--bytes", action="store_true", help="let each byte be a token")
    parser.add_argument("--digest", help="the hash that the corpus must have")
    arguments = parser.parse_args()
    corpus = prepare(
        arguments.out,
        arguments.kind,
        arguments.text,
        BYTES if arguments.bytes else VOCABULARY,
        arguments.megabytes,
        arguments.debian,
        arguments.held_out,
    )
    for name, value in asdict(corpus.sizes).items():
        print(f"{name}: {value}")
    if arguments.digest not in (None, corpus.sizes.digest):
        raise SystemExit(f"--digest: the corpus has the hash {corpus.sizes.digest}, must be {arguments.digest}")


if __name__ == "__main__":
    main()
