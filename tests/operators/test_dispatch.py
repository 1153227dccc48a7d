"""The choice of a backend: its explanation, how to override it, and the warning about a slow fallback."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import mglu_ops
from mglu_ops import dispatch
from mglu_ops.backends import Backend
from mglu_ops.backends.base import Prepared, Reason
from mglu_ops.backends.composite import Composite
from mglu_ops.call import Call, Layout, metadata_key
from mglu_ops.given import BackwardGiven, Given
from tests.support.layers import make_layer


def call(tokens: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, 16), torch.randn(8, 16), torch.ops.mglu.pack_masks(torch.rand(2, 8, 16) > 0.5)


def test_explain_says_which_backend_a_cpu_call_takes_and_why() -> None:
    choice = mglu_ops.explain_dispatch(*call())
    assert (choice.backend, choice.is_fallback) == ("cpu", False)
    assert "instruction set" in str(choice)
    choice = mglu_ops.explain_dispatch(*(t.double() if t.is_floating_point() else t for t in call()))
    assert (choice.backend, choice.is_fallback) == ("composite", False)
    assert "torch.float64" in str(choice)


def test_an_override_that_cannot_take_the_call_says_why() -> None:
    with pytest.raises(ValueError, match=r"backend: got 'cuda', which cannot take this call: x is on cpu"):
        dispatch.forward(Given(*call(), "silu", None), backend="cuda")
    with pytest.raises(ValueError, match=r"backend: got 'fast', must be composite, cpu, cuda, triton"):
        dispatch.forward(Given(*call(), "silu", None), backend="fast")


def test_an_override_prepares_the_call_with_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = []

    class Ones(Backend):
        name = "ones"
        device_type = None

        def reason(self, task: str, call: Call) -> None:
            return None

        def prepare(self, task: str, call: Call, launch: object = None) -> Prepared:
            prepared.append((call.leading, call.tokens, call.x.strides, call.mask_weights.strides, launch))
            return lambda given: given.x.new_ones(call.result_shape)

    x, weight, packed = call(6)
    monkeypatch.setattr(dispatch, "BACKENDS", {"ones": Ones()})
    term_weights = torch.ones(2, 3, 2)
    result = dispatch.forward(
        Given(x.view(2, 3, 16), weight, packed, "silu", term_weights), backend="ones", launch="slowly"
    )
    assert prepared == [((2, 3), 6, (16, 1), (2, 1), "slowly")]
    assert torch.equal(result, torch.ones(2, 3, 8))


@pytest.mark.parametrize("what", ["x", "mask_weights"])
@pytest.mark.parametrize("op", ["forward", "forward_train"])
def test_only_the_argument_whose_rows_need_a_copy_is_copied_at_each_call(op: str, what: str) -> None:
    x, weight, packed = call(6)
    args = {"x": x.view(2, 3, 16), "weight": weight, "packed_masks": packed, "activation": "silu"}
    args["mask_weights"] = torch.rand(2, 3, 2)
    args[what] = args[what].transpose(0, 1).contiguous().transpose(0, 1)
    run = getattr(torch.ops.mglu, op)
    for _ in range(2):
        for got, want in zip(run(**args), run(**(args | {what: args[what].contiguous()})), strict=True):
            assert torch.equal(got, want)
        args[what].mul_(2)


@pytest.mark.parametrize("trains", [True, False])
def test_training_runs_on_the_cuda_backend_where_it_can(monkeypatch: pytest.MonkeyPatch, trains: bool) -> None:
    """Backends get two-dimensional x and contiguous partials, for any shapes and strides of the call."""
    described, shapes = [], []

    class Cuda(Composite):
        name = "cuda"

        def reason(self, task: str, call: Call) -> Reason | None:
            described.append((call.leading, call.mask_weights_dtype))
            return None if trains else Reason("it does not train")

        def prepare(self, task: str, call: Call, launch: object = None) -> Prepared:
            prepared = super().prepare(task, call)

            def run(given: Given | BackwardGiven) -> Any:
                if isinstance(given, Given):
                    shapes.append((given.x.shape, given.mask_weights.shape))
                else:
                    grad, x, _, _, partials, *_ = given
                    shapes.append((grad.shape, x.shape, partials.shape, partials.is_contiguous()))
                return prepared(given)

            return run

    x, weight, packed = call(6)
    x, term_weights = x.view(3, 2, 16).transpose(0, 1), torch.rand(2, 3, 2).bfloat16()
    monkeypatch.setattr(dispatch, "BACKENDS", {"composite": Composite()})
    monkeypatch.setattr(dispatch, "_prepared", {})
    result, partials = torch.ops.mglu.forward_train(x, weight, packed, "silu", term_weights)
    strided = partials.transpose(0, 1).contiguous().transpose(0, 1)
    rest = (weight, packed, strided, (True, True), None, term_weights.dtype)
    gradients = torch.ops.mglu.backward(result, x, *rest)
    monkeypatch.setattr(dispatch, "BACKENDS", {"cuda": Cuda(), "composite": Composite()})
    monkeypatch.setattr(dispatch, "_prepared", {})
    again = torch.ops.mglu.forward_train(x, weight, packed, "silu", term_weights)
    assert all(map(torch.equal, again, (result, partials)))
    for got, want in zip(torch.ops.mglu.backward(result, x, *rest), gradients, strict=True):
        assert torch.equal(got, want)
    for _ in range(2):  # the second call uses what the first one prepared
        torch.ops.mglu.backward(torch.ops.mglu.forward_train(x, weight, packed, "silu", term_weights)[0], x, *rest)
    assert described == [((6,), torch.bfloat16)] * 2
    assert shapes == (3 * [((6, 16), (6, 2)), ((6, 8), (6, 16), (6, 5, 8), True)] if trains else [])


def test_a_fallback_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = dispatch.Choice("composite", "library GEMMs: no compiler in this test", is_fallback=True)
    monkeypatch.setattr(dispatch, "choose", lambda *arguments: choice)
    with pytest.warns(UserWarning, match="no compiler in this test"):
        torch.ops.mglu.forward(*call())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.ops.mglu.forward(*call())


def test_an_alignment_holds_for_every_expert() -> None:
    """The second expert starts 72 bytes after the first, which is a multiple of 8 but not of 16."""
    numbers = torch.zeros(256, dtype=torch.float16)
    assert numbers.data_ptr() % 16 == 0
    for experts, stride, alignment in ((3, 36, 8), (1, 36, 16), (3, 40, 16), (3, 0, 16), (3, 33, 2)):
        assert Layout.of_every_expert(numbers.as_strided((experts, 4, 8), (stride, 8, 1))).alignment == alignment


@pytest.mark.parametrize("name", ["x", "weight", "packed_masks"])
def test_layouts_with_other_distances_between_rows_have_other_keys(name: str) -> None:
    """The layouts have one storage, one offset and one shape, but a prepared call fits only one."""
    given = make_layer((5,), 24, 10, 3).given
    shape, strides = getattr(given, name).shape, getattr(given, name).stride()
    storage = torch.zeros(3 * shape.numel(), dtype=getattr(given, name).dtype)
    keys = {
        metadata_key(given._replace(**{name: storage.as_strided(shape, (more * strides[0], *strides[1:]))}))
        for more in (1, 2, 3)
    }
    assert len(keys) == 3
