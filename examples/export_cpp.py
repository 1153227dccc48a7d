"""Export a small language model's feed-forward block to a package, and run it in a C++ program without Python.

    python examples/export_cpp.py --out build/examples/export_cpp

The program is `run_package` of the C++ library, which is built first. It compares its results with PyTorch's. The build
needs CMake and a C++20 compiler (csrc/README.md). The example takes one to three minutes on 2 CPU cores, mostly for the
build.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import mglu_ops
from mglu_ops.packaging.tensor_file import write_tensor


def block(hidden: int, intermediate: int, n_masks: int) -> nn.Module:
    """A norm and a frozen SwiMGLU feed-forward layer."""
    torch.manual_seed(0)
    feed_forward = mglu_ops.nn.SwiMGLU(hidden, intermediate, n_masks=n_masks)
    return mglu_ops.freeze(nn.Sequential(nn.RMSNorm(hidden), feed_forward).eval())


def write_examples(model: nn.Module, hidden: int, folder: Path) -> list[str]:
    """Write an input and the model's result for several numbers of tokens. Return the file names for the program."""
    names: list[str] = []
    for tokens in (1, 7, 64):
        x: Tensor = torch.randn(tokens, hidden)
        for name, tensor in ((f"x{tokens}", x), (f"y{tokens}", model(x))):
            write_tensor(folder / name, tensor)
            names.append(name)
    return names


def run(folder: Path, hidden: int, intermediate: int, n_masks: int, flags: list[str]) -> None:
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:5.1f} s] {text}", flush=True)

    folder.mkdir(parents=True, exist_ok=True)
    model = block(hidden, intermediate, n_masks)
    mglu_ops.export(model, (torch.randn(1, hidden),), folder / "model.pt2", backend="cpu", strict=True)
    size = (folder / "model.pt2").stat().st_size
    say(f"exported a {hidden} x {intermediate} block with {n_masks} masks: {folder / 'model.pt2'}, {size / 1e6:.1f} MB")
    with torch.no_grad():
        files = write_examples(model, hidden, folder)
    say("building the C++ library and run_package")
    library = mglu_ops.build_runtime(folder, program=True, flags=flags)
    say(f"built {library}")
    program = subprocess.run([folder.resolve() / "run_package", "model.pt2", *files], cwd=folder, text=True)
    if program.returncode:
        raise SystemExit(f"run_package ended with code {program.returncode}")
    say("the C++ program's results agree with PyTorch's, for 1, 7 and 64 tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the package, the library and the program (temporary)")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--n-masks", type=int, default=4)
    parser.add_argument(
        "--flag", action="append", default=[], help="another flag for the C++ compiler, such as --flag=-O0"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mglu-export-") as temporary:
        out = arguments.out or Path(temporary)
        run(out, arguments.hidden, arguments.intermediate, arguments.n_masks, arguments.flag)


if __name__ == "__main__":
    main()
