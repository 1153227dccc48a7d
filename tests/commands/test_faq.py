"""The snippets of FAQ.md run; links and commands are tested with those of all pages (test_readme.py)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_snippets_run(tmp_path: Path) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / "FAQ.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    assert snippets
    (tmp_path / "faq.py").write_text("\n".join(snippets))
    process = subprocess.run([sys.executable, "faq.py"], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert process.returncode == 0, process.stderr
