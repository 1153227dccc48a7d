"""The model card of a checkpoint, which says what to import before it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_CARD = """\
---
library_name: transformers
tags:
- mglu
---

# {model}

A model with Masked Gated Linear Units (arXiv 2506.23225) in place of SwiGLU. Transformers alone does not know its
`model_type`, `{model_type}`, and an upgrade does not help. Install `mglu_ops` (in a clone of it,
`pip install ".[transformers]"`), and import it first:

```python
import mglu_ops.transformers  # registers the model with AutoConfig, AutoModel and AutoModelForCausalLM
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{folder}")
```

vLLM finds the model automatically where `mglu_ops` is installed too, if its plugin has the architecture.
"""


def write_model_card(model: Any, folder: Path) -> None:
    """Write README.md into the folder of a checkpoint, unless it has one."""
    card = folder / "README.md"
    if not card.exists():
        names = {"model": type(model).__name__, "model_type": model.config.model_type, "folder": folder.name}
        card.write_text(_CARD.format(**names))
