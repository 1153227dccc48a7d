"""The examples that the recogniser reads, for graphs that come without them, or without what requires a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node

from .shapes import example


def record_examples(gm: GraphModule, inputs: Sequence[Any] | None = None) -> None:
    """Run a graph on fake tensors and keep the value of each node, as Dynamo does.

    The values that `torch.export` keeps are detached from what requires a gradient, so that they cannot tell a mask
    that is trained from one that is not.

    Raises:
        ValueError: `inputs` are missing, too few or too many, or the module does not take them.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    if inputs is None:
        inputs = [example(node) for node in placeholders]
        if any(value is None for value in inputs):
            raise ValueError("example_inputs: tracing recorded none at the graph's placeholders, must be given")
    if len(inputs) != len(placeholders):
        raise ValueError(f"example_inputs: got {len(inputs)}, must be {len(placeholders)}, one a placeholder")
    mode = detect_fake_mode(inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode:
            _Recorder(gm, mode).run(*(_as_fake(mode, value) for value in inputs))
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"example_inputs: the module does not take them: {error}") from error


def _as_fake(mode: FakeTensorMode, value: Any) -> Any:
    is_real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    return mode.from_tensor(value, static_shapes=True) if is_real else value


class _Recorder(Interpreter):
    def __init__(self, gm: GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._mode = mode
        self._fakes: dict[int, Any] = {}

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._fakes.setdefault(id(value), _as_fake(self._mode, value))

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        n.meta["example_value"] = value
        return value
