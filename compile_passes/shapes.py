"""Reads shapes, dtypes, slices and repetitions of nodes from the example values that tracing recorded.

No function here adds a guard on a symbolic size. Sizes are compared by `statically_known_true`. A function that needs a
number treats a symbolic size as unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any

import torch
from torch._C import _functorch as functorch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .symbols import as_call


def example(node: Any) -> Any:
    """The example value of a node: the fake value that tracing recorded. Any other argument is returned unchanged.

    Dynamo records the value as `example_value`, and `torch.export` as `val`.
    """
    if not isinstance(node, Node):
        return node
    return node.meta["example_value"] if "example_value" in node.meta else node.meta.get("val")


def tensor_example(node: Any) -> torch.Tensor | None:
    """The example value of a node, if it is a tensor."""
    value = example(node)
    return value if isinstance(value, torch.Tensor) else None


def dtype_of(node: Any) -> torch.dtype | None:
    """The dtype of a node, if it is a tensor."""
    value = tensor_example(node)
    return None if value is None else value.dtype


def is_distributed(node: Any) -> bool:
    """True if a node holds a tensor of `torch.distributed`, such as a DTensor."""
    return type(tensor_example(node)).__module__.startswith("torch.distributed")


def unusual_kind(node: Any) -> str | None:
    """The kind of a node's tensor: nested, sparse or a subclass. None for plain tensors and DTensors."""
    value = tensor_example(node)
    if value is None or is_distributed(node):
        return None
    if value.is_nested:
        return "nested tensor"
    if value.layout != torch.strided:
        return f"tensor of layout {value.layout}"
    return type(value).__name__ if is_traceable_wrapper_subclass(value) else None


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """True if dtype `wide` represents every value of dtype `narrow`."""
    return torch.promote_types(wide, narrow) == wide


def requires_grad(argument: Any) -> bool:
    """True if a node's tensor required a gradient during tracing."""
    value = tensor_example(argument)
    while value is not None and functorch.is_functorch_wrapped_tensor(value):  # `vmap` wraps tensors
        value = functorch.get_unwrapped(value)
    return value is not None and value.requires_grad


def equal_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """True if two shapes are known to be equal."""
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))


def has_shape(node: Any, sizes: Sequence[Any]) -> bool:
    """True if a node is a tensor that is known to have this shape."""
    value = tensor_example(node)
    return value is not None and equal_sizes(value.shape, sizes)


def same_shape(first: Any, *others: Any) -> bool:
    """True if all nodes are tensors of the same known shape."""
    value = tensor_example(first)
    return value is not None and all(has_shape(node, value.shape) for node in others)


def is_like(node: Node, weight: Node) -> bool:
    """True if a node has the shape of a weight, or of a stack of such weights."""
    made, held = tensor_example(node), tensor_example(weight)
    if made is None or held is None or made.dim() not in (2, 3):
        return False
    return equal_sizes(made.shape[-2:], held.shape[-2:])


def broadcasts_to(node: Any, result: Any) -> bool:
    """True if a tensor broadcasts to the shape of `result`."""
    small, large = tensor_example(node), tensor_example(result)
    if small is None or large is None or small.dim() > large.dim():
        return False
    sizes = zip(reversed(small.shape), reversed(large.shape), strict=False)
    return all(statically_known_true(a == b) or statically_known_true(a == 1) for a, b in sizes)


def dims(argument: Any) -> int:
    """The number of dimensions of a node's tensor; -1 if it is not a tensor."""
    value = tensor_example(argument) if isinstance(argument, Node) else None
    return -1 if value is None else value.dim()


def is_matrix(argument: Any) -> bool:
    """True if an argument is a node whose tensor has two dimensions."""
    return dims(argument) == 2


def holds_experts(argument: Any) -> bool:
    """True if an argument is a node whose tensor has three dimensions: `[experts, out_features, in_features]`."""
    return dims(argument) == 3


def size(node: Any, dim: int) -> int | None:
    """The size of a node's tensor along a dimension; None if it is symbolic."""
    value = tensor_example(node)
    if value is None or not -value.dim() <= dim < value.dim():
        return None
    found = value.shape[dim]
    return found if isinstance(found, int) else None


def has_one_element(node: Any) -> bool:
    """True if a node is a tensor with a single element, such as a learned scale."""
    value = tensor_example(node)
    return value is not None and all(isinstance(n, int) and n == 1 for n in value.shape)


def dimension(argument: Any, tensor: Any) -> int | None:
    """The `dim` argument of a call on `tensor`, made non-negative; None if it does not name a single dimension."""
    (single,) = argument if isinstance(argument, (list, tuple)) and len(argument) == 1 else (argument,)
    count = dims(tensor)
    if isinstance(single, bool) or not isinstance(single, int) or not -count <= single < count:
        return None
    return single % count


def slice_of(node: Any) -> tuple[Node, int, int] | None:
    """`(tensor, dim, index)` if `node` selects one index of a dimension, in any spelling; else None."""
    call = as_call(node)
    if call is None or call.symbol not in ("select", "getitem", "squeeze"):
        return None
    if call.symbol == "select":
        return _slice(*call.args)
    base, index = call.args
    if call.symbol == "squeeze":
        dim = dimension(index, base)
        return None if dim is None or size(base, dim) != 1 else (base, dim, 0)
    inner = as_call(base)
    if inner is not None and inner.symbol == "unbind":
        base, dim = inner.args
        return _slice(base, dim, index)
    return _slice(base, *_single_item(base, index))


def is_given(node: Node) -> bool:
    """True if a node is an input or an attribute of the graph, or a slice of one."""
    found = slice_of(node)
    return node.op in ("placeholder", "get_attr") if found is None else is_given(found[0])


def _slice(base: Any, dim: Any, index: Any) -> tuple[Node, int, int] | None:
    """`(base, dim, index)` with `dim` and `index` made non-negative; None if `index` is not a number."""
    dim = dimension(dim, base)
    if dim is None or isinstance(index, bool) or not isinstance(index, int):
        return None
    if index < 0:
        length = size(base, dim)
        if length is None:
            return None
        index += length
    return base, dim, index


def _single_item(base: Any, index: Any) -> tuple[Any, Any]:
    """`(dim, item)` for an index that is `:` in all other dimensions; `(None, None)` for any other index."""
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in items:
        position = items.index(Ellipsis)
        items[position : position + 1] = [slice(None)] * (dims(base) - len(items) + 1)
    partial = [(dim, item) for dim, item in enumerate(items) if not is_whole(item)]
    return partial[0] if len(partial) == 1 else (None, None)


def is_whole(item: Any) -> bool:
    """True if an item of an index is `:`."""
    return isinstance(item, slice) and item.start is None and item.stop is None and item.step in (None, 1)


def range_of(node: Any) -> tuple[Node, int, int, int] | None:
    """`(tensor, dim, start, stop)` if `node` is `tensor[..., start:stop, ...]` or an entry of a split; else None."""
    call = as_call(node)
    if call is None or call.symbol not in ("getitem", "narrow", "slice"):
        return None
    if call.symbol == "narrow":
        base, dim, start, length = call.args
        is_known = isinstance(start, int) and isinstance(length, int) and start >= 0
        bounds = (start, start + length) if is_known else None
    elif call.symbol == "slice":
        base, dim, *part = call.args
        bounds = _bounds(slice(*part), size(base, dim))
    else:
        base, index = call.args
        inner = as_call(base)
        if inner is not None and inner.symbol == "split" and isinstance(index, int):
            bounds = _bounds_of_a_part(base, inner.args[1], index)
            base, dim = inner.args
        else:
            dim, part = _single_item(base, index)
            bounds = _bounds(part, size(base, dim)) if isinstance(part, slice) else None
    dim = dimension(dim, base)
    return None if dim is None or bounds is None else (base, dim, *bounds)


def strided_slice_of(node: Any) -> tuple[int, int, int] | None:
    """`(dim, start, step)` if `node` is `tensor[..., start::step, ...]`, up to the end of the dimension; else None."""
    call = as_call(node)
    if call is None or call.symbol not in ("getitem", "slice"):
        return None
    base, *rest = call.args
    dim, part = (rest[0], slice(*rest[1:])) if call.symbol == "slice" else _single_item(base, *rest)
    dim = dimension(dim, base)
    length = None if dim is None else size(base, dim)
    if length is None or not isinstance(part, slice):
        return None
    if not all(isinstance(item, (int, NoneType)) for item in (part.start, part.stop, part.step)):
        return None
    start, stop, step = part.indices(length)
    return (dim, start, step) if dim is not None and stop == length and step > 1 else None


def _bounds(part: slice, length: int | None) -> tuple[int, int] | None:
    """`(start, stop)` of a slice; None for a step other than 1, an empty slice or a symbolic bound."""
    numbers = [item for item in (part.start, part.stop) if item is not None]
    if length is None or part.step not in (None, 1) or not all(isinstance(item, int) for item in numbers):
        return None
    start, stop, _ = part.indices(length)
    return (start, stop) if start < stop else None


def _bounds_of_a_part(parts: Node, dim: int, index: int) -> tuple[int, int] | None:
    """`(start, stop)` of entry `index` of a `chunk` or `split`, from the sizes of the entries before it."""
    values = example(parts)
    if not isinstance(values, (tuple, list)):
        return None
    sizes = [value.shape[dim] for value in values]
    if not all(isinstance(item, int) for item in sizes):
        return None
    start = sum(sizes[:index])
    return start, start + sizes[index]


def column_of(node: Any) -> tuple[Node, int] | None:
    """`(tensor, i)` if `node` is `tensor[..., i : i + 1]`, in any spelling; else None."""
    call, found = as_call(node), None
    if call is None:
        return None
    if call.symbol == "unsqueeze" and dimension(call.args[1], node) == dims(node) - 1:
        found = slice_of(call.args[0])
    elif call.symbol == "getitem" and isinstance(call.args[1], tuple) and call.args[1][-1:] == (None,):
        base, index = call.args
        found = _slice(base, *_single_item(base, index[:-1]))
    elif (part := range_of(node)) is not None and part[3] == part[2] + 1:
        found = part[:3]
    return None if found is None or found[1] != dims(found[0]) - 1 else (found[0], found[2])


def repeated(node: Any) -> tuple[Any, int | None]:
    """`(tensor, dim)` if `node` repeats a tensor along a new dimension `dim`; otherwise `(node, None)`."""
    call = as_call(node)
    if call is None or call.symbol not in ("unsqueeze", "getitem", "expand", "repeat", "expand_as"):
        return node, None
    base: Any = call.args[0]
    dim: int | None
    if call.symbol == "unsqueeze":
        dim = dimension(call.args[1], node)
    elif call.symbol == "getitem":
        position, item = _single_item(base, call.args[1])
        dim = position if item is None else None
    else:
        base, dim = repeated(base) if dims(base) == dims(node) else (base, 0)
    many = tensor_example(node)
    if dim is None or many is None or not has_shape(base, (*many.shape[:dim], *many.shape[dim + 1 :])):
        return node, None
    return base, dim


def sources(node: Node) -> set[Node]:
    """A node and all nodes that it is computed from."""
    found: set[Node] = set()
    pending = [node]
    while pending:
        if (current := pending.pop()) not in found:
            found.add(current)
            pending.extend(current.all_input_nodes)
    return found


def submodule(graph: Graph, node: Any) -> GraphModule | None:
    """The graph module that a node calls, or that it passes as the body of a higher-order operator; else None."""
    if graph.owning_module is None or not isinstance(node, Node) or node.op not in ("get_attr", "call_module"):
        return None
    module = getattr(graph.owning_module, str(node.target), None)
    return module if isinstance(module, GraphModule) else None
