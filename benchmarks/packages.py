"""Times layers of exported packages, called by torch's proxy executor or compiled into the package.

python -m benchmarks.packages --out benchmarks/results [--device cuda]
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mglu_ops
from benchmarks.records import environment, parser_of, write_table
from mglu_ops.packaging.tensor_file import write_tensor

LAYERS, FEATURES, MASKS = 32, 64, 2
PROTOCOL = (
    "a chain of 32 layers of 64 features and two masks, float32, one token, so small that a call is hardly more than "
    "its overhead and an addition; csrc/library/programs/run_package.cpp runs each package, with no Python in the "
    "process and on one thread, in rounds of 200 calls; the best of five rounds, us per layer; results agree with eager"
)
VARIANTS: dict[str, dict[str, Any]] = {
    "proxy executor": {},
    "composite, in the package": {"backend": "composite"},
}
"""Name of a variant -> its arguments to `mglu_ops.export`."""


class Chain(nn.Module):
    """Layers with residual connections, so that values neither vanish nor explode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mglu_ops.nn.MGLU(FEATURES, FEATURES, n_masks=MASKS) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def bench(device: str) -> list[dict[str, object]]:
    """Measure the microseconds per layer of each variant."""
    torch.manual_seed(0)
    model = Chain().eval().to(device)
    x = torch.randn(1, FEATURES, device=device)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        program = mglu_ops.build_runtime(root, program=True).with_name("run_package")
        write_tensor(root / "x", x)
        write_tensor(root / "y", model(x))
        for name, arguments in VARIANTS.items():
            mglu_ops.export(model, (x,), root / "model.pt2", **arguments)
            options = "--tolerance", "1e-4", "--time", "200"
            command: list[str | Path] = [program, root / "model.pt2", *options, root / "x", root / "y"]
            process = subprocess.run(command, capture_output=True, text=True, check=False)
            found = re.search(r"([\d.]+) us a call", process.stdout)
            if process.returncode != 0 or found is None:
                raise RuntimeError(f"{name}: {process.stdout}{process.stderr}")
            rows.append({"variant": name, "device": device, "microseconds": round(float(found[1]) / LAYERS, 3)})
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    rows = bench(options.device)
    print(*rows, sep="\n")
    write_table(rows, environment(PROTOCOL), options.out, "packages")


if __name__ == "__main__":
    main()
