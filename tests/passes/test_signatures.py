"""Signatures of spellings: how their text is parsed, and which arguments the rules receive."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compile_passes.symbols import Signature

TENSOR = torch.zeros(2)


@pytest.mark.parametrize(
    ("text", "args", "kwargs", "bound"),
    [
        ("input, other", (1, 2), {}, {"input": 1, "other": 2}),
        ("input, other", (1,), {"other": 2}, {"input": 1, "other": 2}),
        ("input, other", (), {"self": 1, "other": 2}, {"input": 1, "other": 2}),
        ("input, other", (), {"other": 2, "input": 1}, {"input": 1, "other": 2}),
        ("dim|axis=0", (), {"axis": 1}, {"dim": 1}),
        ("dim|axis=0", (), {"dim": 1}, {"dim": 1}),
        ("dim|axis=0", (), {}, {"dim": 0}),
        ("dim=None, start='a'", (), {}, {"dim": None, "start": "a"}),
        # Missing, unknown and repeated arguments
        ("input, other", (1,), {}, None),
        ("input", (1, 2), {}, None),
        ("input", (1,), {"other": 2}, None),
        ("input", (1,), {"input": 2}, None),
        # Fixed arguments
        ("input, alpha==1", (1,), {}, {"input": 1}),
        ("input, alpha==1", (1, 1.0), {}, {"input": 1}),
        ("input, alpha==1", (1,), {"alpha": 2}, None),
        ("input, alpha==1", (1,), {"alpha": 0.5}, None),
        ("input, alpha==1", (1,), {"alpha": None}, None),
        ("input, alpha==1", (1,), {"alpha": torch.ones(())}, None),
        ("input, mode=='a'", (1, "b"), {}, None),
        ("input, dtype==None", (1, None), {}, {"input": 1}),
        ("input, dtype==None", (1, 0), {}, None),
        ("input, dtype==None", (1, torch.float32), {}, None),
        # Arguments that the rules do not receive
        ("input, -size, dim=0", (1, 2, 3), {}, {"input": 1, "dim": 3}),
        ("-size, input", (), {"input": 1}, {"input": 1}),
        ("input, -inplace", (1, True), {}, {"input": 1}),
        ("input, -inplace", (1,), {"inplace": False}, {"input": 1}),
        ("input, -inplace", (1, TENSOR), {}, None),
        ("input, -size", (1, TENSOR), {}, {"input": 1}),
        ("input, -axis", (1, TENSOR), {}, {"input": 1}),
        # Any further arguments
        ("input, *sizes", (1, 2, 3), {}, {"input": 1, "sizes": (2, 3)}),
        ("input, *sizes", (1, [2, 3]), {}, {"input": 1, "sizes": (2, 3)}),
        ("input, *sizes", (1, 2), {}, {"input": 1, "sizes": (2,)}),
        ("input, *sizes", (1, [2], [3]), {}, None),
        ("input, *sizes", (1, torch.int32), {}, None),
        ("input, *sizes|size", (1,), {"size": (2,)}, {"input": 1, "sizes": (2,)}),
        ("input, ...", (1, 2), {"other": 3}, {"input": 1}),
        ("...", (1, 2), {}, {}),
    ],
)
def test_bind(text: str, args: tuple[Any, ...], kwargs: dict[str, Any], bound: dict[str, Any] | None) -> None:
    assert Signature.parse(text).bind(args, kwargs) == bound


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [
        *(("input, other=0, alpha==1, *sizes", True), ("input, -inplace", True)),
        *(("input, -axis", False), ("input, -size", False), ("input, ...", False)),
    ],
)
def test_the_arguments_of_the_rules_determine_a_call(text: str, is_whole: bool) -> None:
    assert Signature.parse(text).is_whole is is_whole
