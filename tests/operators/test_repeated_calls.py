"""A repeated call skips the checks. No call counts as repeated if anything that the checks depend on has changed.

Each test makes a good call, and changes one property of one argument. The next call must give the same error or the
same bits as in a new process. The calls run in a forked process, because a call that wrongly skips a check reads memory
outside the tensor.
"""

from __future__ import annotations

import ctypes
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from mglu_ops import batch_invariance, dispatch
from mglu_ops.call import arguments_key, metadata_key
from mglu_ops.given import Given
from tests.support.layers import arguments_of, make_layer, routing_of

Arguments = dict[str, Any]
Change = Callable[[Arguments, str], None]

SPARE = 64
"""Elements before and after an argument in its storage."""

TOKENS, IN, OUT, N_MASKS = 8, 24, 16, 3  # every tensor's size is a multiple of 16 bytes


def _roomy(tensor: Tensor) -> Tensor:
    """A copy in the middle of a larger storage."""
    flat = tensor.new_zeros(tensor.numel() + 2 * SPARE)
    flat[SPARE : SPARE + tensor.numel()] = tensor.flatten()
    return flat[SPARE : SPARE + tensor.numel()].view(tensor.shape)


def arguments(op: str) -> Arguments:
    """The arguments of a good call. All sizes differ, and the values are the same at every call."""
    layer = make_layer((TOKENS,), IN, OUT, N_MASKS, routing=routing_of(op), experts=5, weighted=True)
    args = arguments_of(op, layer)
    return {name: _roomy(value) if isinstance(value, Tensor) else value for name, value in args.items()}


OPS = ("forward", "forward_ste", "forward_train", "backward")
OPS_OF_EXPERTS = ("experts_forward", "experts_down")
OPS_OF_EXPERTS += ("grouped_forward", "grouped_forward_ste", "grouped_forward_train", "grouped_backward")
TENSORS = [
    (op, name) for op in OPS + OPS_OF_EXPERTS for name, value in arguments(op).items() if isinstance(value, Tensor)
]


def run(op: str, args: Arguments) -> object:
    """The results of a call, or its error."""
    try:
        results = getattr(torch.ops.mglu, op)(**args)
    except Exception as error:
        return type(error).__name__, str(error)
    return [result.detach() for result in (results if isinstance(results, tuple) else (results,))]


def forget() -> None:
    dispatch._prepared.clear()


def _end(tensor: Tensor) -> int:
    """The number of bytes that a contiguous tensor needs in its storage."""
    return (tensor.storage_offset() + tensor.numel()) * tensor.itemsize


def free(args: Arguments, name: str) -> None:
    args[name].untyped_storage().resize_(0)


def shrink(args: Arguments, name: str) -> None:
    args[name].untyped_storage().resize_(_end(args[name]) - 1)


def shrink_to_the_tensor_before(args: Arguments, name: str) -> None:
    """Shrink the storage of two tensors to the first one. A good call with the first must not vouch for the second."""
    tensor = args[name]
    pair = torch.stack([tensor, tensor])
    args[name] = pair[1]
    pair.untyped_storage().resize_(tensor.nbytes)
    args["first"] = pair[0]


def move(args: Arguments, name: str) -> None:
    """Move the tensor by one element, to an address with another alignment."""
    tensor = args[name]
    tensor.as_strided_(tensor.shape, tensor.stride(), tensor.storage_offset() + 1)


def move_past_the_end(args: Arguments, name: str) -> None:
    tensor = args[name]
    tensor.set_(tensor.untyped_storage(), 2 * SPARE, tensor.shape, tensor.stride())
    tensor.untyped_storage().resize_(_end(tensor) - tensor.itemsize)


def turn(args: Arguments, name: str) -> None:
    """Read the same storage in another order, with the same shape."""
    tensor = args[name]
    sizes = list(tensor.shape)
    strides = [1] * len(sizes)
    for dim in range(1, len(sizes)):
        strides[dim] = strides[dim - 1] * sizes[dim - 1]
    tensor.as_strided_(sizes, strides, tensor.storage_offset())


def stretch_past_the_end(args: Arguments, name: str) -> None:
    tensor = args[name]
    end = _end(tensor)
    tensor.untyped_storage().resize_(2 * end)
    tensor.as_strided_(tensor.shape, [2 * stride for stride in tensor.stride()], tensor.storage_offset())
    tensor.untyped_storage().resize_(end)


def swap_sizes(args: Arguments, name: str) -> None:
    sizes = args[name].shape
    args[name].as_strided_(sizes[::-1], args[name].reshape(sizes[::-1]).stride(), args[name].storage_offset())


def cut(args: Arguments, name: str) -> None:
    """Drop the last row, or the last mask of logits."""
    tensor = args[name]
    tensor.as_strided_((len(tensor) - 1, *tensor.shape[1:]), tensor.stride(), tensor.storage_offset())


def add_a_dimension(args: Arguments, name: str) -> None:
    args[name].unsqueeze_(0)


def other_dtype(args: Arguments, name: str) -> None:
    """Change only the dtype, to another one of the same size."""
    same_size = {torch.float32: torch.int32, torch.uint8: torch.int8, torch.int32: torch.float32}
    same_size[torch.int64] = torch.float64
    args[name] = args[name].view(same_size[args[name].dtype])


def other_device(args: Arguments, name: str) -> None:
    """Change only the device. Layout and storage size stay."""
    tensor = args[name]
    storage = torch.empty(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=tensor.dtype, device="meta")
    args[name] = storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def other_layout(args: Arguments, name: str) -> None:
    args[name] = args[name].to_sparse()


def none(args: Arguments, name: str) -> None:
    args[name] = None


def record(args: Arguments, name: str) -> None:
    if args[name].is_floating_point():
        args[name].requires_grad_()


def other_values(args: Arguments, name: str) -> None:
    args[name].zero_()


BEYOND = (free, shrink, shrink_to_the_tensor_before, move_past_the_end, stretch_past_the_end)
"""Changes after which a tensor has elements outside its storage."""

CHANGES: tuple[Change, ...] = (*BEYOND, move, turn, swap_sizes, cut, add_a_dimension)
CHANGES += (other_dtype, other_device, other_layout, none, record, other_values)

OTHER_ARGUMENTS = [
    *((op, "activation", value) for op in OPS[:3] for value in ("gelu", "swish")),
    ("backward", "needs", [True, False]),
    ("backward", "logits_dtype", None),
    ("backward", "logits_dtype", torch.bfloat16),
    ("backward", "logits_dtype", torch.int64),
    ("backward", "mask_weights_dtype", None),
    ("backward", "mask_weights_dtype", torch.bool),
]


def outcome(op: str, name: str, change: Change, *, repeated: bool) -> object:
    """The results or the error of a changed call. If `repeated`, a good call with the same tensors precedes it."""
    forget()
    args = arguments(op)
    if repeated:
        good = run(op, args)
        assert isinstance(good, list), good
    change(args, name)
    first = args.pop("first", None)
    if repeated and first is not None:
        run(op, args | {name: first})
    return run(op, args)


def outcomes_in_a_fork(op: str, name: str) -> list[tuple[object, object]]:
    """For each change: the outcomes as a first call and after a good call. The list ends at a change that crashes."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(writing, "wb") as file:
                for change in CHANGES:
                    pickle.dump([outcome(op, name, change, repeated=again) for again in (False, True)], file)
                    file.flush()
        finally:
            os._exit(0)
    os.close(writing)
    found = []
    with os.fdopen(reading, "rb") as file, suppress(EOFError):
        while True:
            found.append(pickle.load(file))
    os.waitpid(child, 0)
    return found


def same(got: object, expected: object) -> bool:
    if isinstance(got, list) and isinstance(expected, list):
        return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    return got == expected


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of its own sparse tensors and of resizing
@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_a_changed_tensor_is_checked_as_in_a_first_call(op: str, name: str) -> None:
    found = outcomes_in_a_fork(op, name)
    assert len(found) == len(CHANGES), f"{CHANGES[len(found)].__name__} ended the process"
    for change, (expected, got) in zip(CHANGES, found, strict=True):
        assert same(got, expected), f"{change.__name__}: got {got}, expected {expected}"
        if change in BEYOND:
            error, message = got
            assert error == "ValueError", change.__name__
            assert message.startswith(f"{name}: got a tensor of shape ")
            assert message.endswith("the storage was resized")


@pytest.mark.parametrize(("op", "name", "value"), OTHER_ARGUMENTS)
def test_a_changed_argument_other_than_a_tensor_makes_another_call(op: str, name: str, value: object) -> None:
    def change(args: Arguments, name: str) -> None:
        args[name] = value

    expected, got = (outcome(op, name, change, repeated=again) for again in (False, True))
    assert same(got, expected), f"got {got}, expected {expected}"
    assert not same(got, run(op, arguments(op)))


@pytest.mark.parametrize("op", [*OPS, *OPS_OF_EXPERTS, "experts_down_backward"])
def test_repeated_calls_also_obey_the_batch_invariant_mode(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No CPU kernel is batch invariant, so the mode makes every call raise an error."""
    args = arguments(op)
    assert isinstance(run(op, args), list)
    monkeypatch.setattr(batch_invariance, "enabled", True)
    with pytest.raises(RuntimeError, match=r"set_batch_invariant_mode\(True\) asks for results"):
        getattr(torch.ops.mglu, op)(**args)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, name in TENSORS if not op.endswith("_ste")])
def test_another_alignment_makes_another_call(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared calls differ by alignment, because the alignment decides how many bytes GPU kernels load at once."""
    monkeypatch.setattr(dispatch, "_prepared", {})
    args = arguments(op)
    tensor = args[name].contiguous()
    memory = bytearray(tensor.nbytes + 32)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 16
    for start in (first, first + tensor.itemsize):
        args[name] = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)
        args[name].copy_(tensor)
        assert isinstance(run(op, args), list)
    assert len(dispatch._prepared) == 2


def test_parts_of_a_large_x_make_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets with the same alignment share a prepared call. Preparing takes several times as long as a small call."""
    monkeypatch.setattr(dispatch, "_prepared", {})
    args = arguments("forward")
    x = args["x"].contiguous()
    for part in torch.stack([x] * 48).unflatten(0, (3, 16))[:, 0]:  # every 16th part, for the same alignment
        assert isinstance(run("forward", args | {"x": part}), list)
    assert len(dispatch._prepared) == 1


class OnAnotherGpu:
    """A tensor that claims to be on a second GPU. It has only the attributes that keys of kept calls read."""

    __class__ = torch.Tensor  # for isinstance
    device = torch.device("cuda", 1)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


@pytest.mark.parametrize("key", [lambda *args: metadata_key(Given(*args)), arguments_key])
@pytest.mark.parametrize("name", ["x", "weight", "packed_masks", "mask_weights"])
def test_another_gpu_makes_another_call(key: Callable[..., object], name: str) -> None:
    args = arguments("forward")
    args = {name: args[name] for name in ("x", "weight", "packed_masks", "activation", "mask_weights")}
    assert key(*args.values()) == key(*args.values())
    assert key(*(args | {name: OnAnotherGpu(args[name])}).values()) != key(*args.values())
