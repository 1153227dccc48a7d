"""Makes the description of a package from the program that it is compiled from."""

from __future__ import annotations

import ast
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import map_arg
from torch.utils import _pytree as pytree

from ..given import DownGiven, Given
from .inputs import Expression, Sizes, dense_order
from .package import InputInfo, LayerInfo, PackageInfo, WeightInfo
from .seal import PackageError

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph, Node


def describe(
    program: ExportedProgram,
    fused: ExportedProgram,
    path: Path,
    device: torch.device,
    backend: str,
    embeds_weights: bool,
) -> PackageInfo:
    """Describe the package of a program. `fused` is the program after fusion, from which the package is compiled.

    Raises:
        ValueError: the program takes inputs that a package cannot check.
    """
    from .. import __version__
    from ..passes import layers_of

    inputs = _describe_inputs(program)
    conditions = _conditions(program, inputs)
    _check_example(program, inputs, conditions)
    downs = fused.graph.find_nodes(op="call_function", target=torch.ops.mglu.experts_down.default)
    return PackageInfo(
        torch=torch.__version__,
        mglu_ops=__version__,
        device=device.type,
        cpu=[platform.machine(), torch.backends.cpu.get_cpu_capability()],
        arch=list(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None,
        backend=backend,
        embeds_weights=embeds_weights,
        inputs=inputs,
        conditions=conditions,
        layers=[*map(_describe_layer, layers_of(fused.graph)), *map(_describe_down, downs)],
        weights=[] if embeds_weights else [WeightInfo.of(*entry) for entry in sorted(tensors_of(fused).items())],
        path=str(path),
    )


def tensors_of(program: ExportedProgram) -> dict[str, Tensor]:
    """Map names to the parameters, buffers and constants of a program."""
    values = {**program.state_dict, **program.constants}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def arguments_of(node: Node) -> dict[str, Any]:
    """Map names to the arguments of a call of an operator; empty for other nodes."""
    if (schema := getattr(node.target, "_schema", None)) is None:
        return {}
    return {**dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)), **node.kwargs}


def fake_arguments_of(layer: Node) -> Given:
    """The arguments of a layer, with fake tensors."""
    return Given(**map_arg(arguments_of(layer), lambda node: node.meta["val"]))


def _describe_layer(layer: Node) -> LayerInfo:
    given = fake_arguments_of(layer)
    return LayerInfo(
        n_masks=int(given.n_masks),
        out_features=int(given.out_features),
        in_features=int(given.x.shape[-1]),
        dtype=_name(given.x.dtype),
        activation=given.activation,
        mask_weights_dtype=None if given.mask_weights is None else _name(given.mask_weights.dtype),
        weight_format=given.weight_format,
        activation_format=given.activation_format,
        experts=0 if given.routing is None else int(given.weight.shape[0]),
        top_k=0 if given.expert_ids is None else _example(given.expert_ids.shape[1]),
    )


def _describe_down(node: Node) -> LayerInfo:
    y, weight, ids, expert_weights, _, weight_format = DownGiven(
        **map_arg(arguments_of(node), lambda argument: argument.meta["val"])
    )
    return LayerInfo(
        n_masks=0,
        out_features=int(weight.shape[1]),
        in_features=int(y.shape[-1]),
        dtype=_name(y.dtype),
        activation="identity",
        mask_weights_dtype=_name(expert_weights.dtype),
        weight_format=weight_format,
        experts=int(weight.shape[0]),
        top_k=_example(ids.shape[1]),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- Inputs ---------------------------------------------------------------------------------------------------------


def _describe_inputs(program: ExportedProgram) -> list[InputInfo]:
    """Describe the inputs in the order of the leaves of `(args, kwargs)`."""
    from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument

    written = _written(program)
    values = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    inputs = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT:
            continue
        name = spec.arg.name
        if isinstance(spec.arg, ConstantArgument):
            value = spec.arg.value
            inputs.append(InputInfo(name, type(value).__name__, [], [], False, repr(value)))
        elif isinstance(spec.arg, TensorArgument):
            inputs.append(_describe_tensor(program, name, values[name], name in written))
        else:
            raise ValueError(
                f"model: {name} is neither a tensor nor a constant, and a package takes no other inputs; make it a "
                "tensor, or fix its value"
            )
    return inputs


def _written(program: ExportedProgram) -> set[str]:
    """The names of the inputs to which a program writes, from its signature, which has them after decomposition."""
    schemas = [getattr(node.target, "_schema", None) for node in program.graph.nodes]
    if any(schema is not None and schema.is_mutable for schema in schemas):
        program = program.run_decompositions({})
    return set(program.graph_signature.user_inputs_to_mutate.values())


def _describe_tensor(program: ExportedProgram, name: str, value: Tensor, is_written: bool) -> InputInfo:
    strides = [_example(stride) for stride in value.stride()]
    shape = [_describe_size(program, size) for size in value.shape]
    order = dense_order([_example(size) for size in value.shape], strides)
    if order is None:
        raise ValueError(
            f"model: its input {name} was exported with an example whose strides {strides} leave gaps or overlap, and "
            f"torch would compile code for these strides alone; export it with a contiguous example"
        )
    return InputInfo(name, _name(value.dtype), shape, order, is_written, None)


def _example(size: Any) -> int:
    """The value of a size or a stride in the example inputs."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _describe_size(program: ExportedProgram, size: Any) -> Any:
    from torch.utils._sympy.printers import PythonPrinter
    from torch.utils._sympy.value_ranges import bound_sympy

    if not isinstance(size, torch.SymInt):
        return int(size)
    if size.node.hint in (0, 1):
        raise ValueError(
            f"model: it was exported with an example of size {size.node.hint} where sizes vary, and torch would "
            "compile code that is right for that size alone; export it with a larger example"
        )
    bounds = bound_sympy(size.node.expr, program.range_constraints)
    high = int(bounds.upper) if bounds.upper.is_Integer else None
    return [max(0, int(bounds.lower)), high, PythonPrinter().doprint(size.node.expr)]


def _conditions(program: ExportedProgram, inputs: list[InputInfo]) -> list[str]:
    """The conditions on sizes under which the program was traced, in the symbols of the inputs.

    Raises:
        ValueError: a package cannot check one of the conditions.
    """
    named = dict(_named_sizes(program, inputs))
    conditions = []
    for guard in program._guards_code:
        text = guard
        for name in sorted(named, key=len, reverse=True):
            text = text.replace(name, f"({named[name]})")
        try:
            condition = Expression(ast.unparse(ast.parse(text, mode="eval")))
            Sizes(inputs, [condition.text])
        except (SyntaxError, PackageError):
            raise ValueError(
                f"model: it was traced for {guard} alone, which a package cannot check; fix its sizes "
                "(dynamic_tokens=False)"
            ) from None
        left, _, right = condition.text.partition(" == ")
        if left != right:  # in the symbols of the inputs, many conditions are trivially true
            conditions.append(condition.text)
    return conditions


def conditions_of_code(graph: Graph, program: ExportedProgram, inputs: list[InputInfo]) -> list[str]:
    """The conditions without which the code of a package would divide by 0 or read past the end of an input.

    For sizes that do not meet a condition, eager PyTorch runs another kernel or raises an error. torch makes no guards
    for such sizes.

    Args:
        graph: the graph that Inductor compiles, after its passes, which may fuse matrix products to attention.
        program: the program from which the graph was made.
        inputs: the description of the program's inputs.

    Raises:
        PackageError: a package cannot check one of the conditions.
    """
    from torch.utils._sympy.printers import PythonPrinter
    from torch.utils._sympy.value_ranges import bound_sympy

    sizes = (size for entry in inputs for size in entry.shape if not isinstance(size, int))
    symbols = {name for _, _, text in sizes for name in Expression(text).names}
    conditions: dict[str, None] = {}
    for size, minimum in _minima(graph):
        is_known = {str(symbol) for symbol in size.free_symbols} <= symbols  # False if a size is a tensor's value
        if not is_known or bound_sympy(size, program.range_constraints).lower >= minimum:
            continue
        text = f"{PythonPrinter().doprint(size)} >= {minimum}"
        try:
            conditions[Expression(text).text] = None
        except PackageError:
            raise PackageError(
                f"model: it is right for {text} alone, which a package cannot check; raise the minima of its sizes "
                "(dynamic_shapes), or fix them (dynamic_tokens=False)"
            ) from None
    return list(conditions)


def _minima(graph: Graph) -> Iterator[tuple[Any, int]]:
    """Yield (size, minimum) for each size of a graph that has a minimum. Sizes are symbolic expressions."""
    import sympy
    from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

    for node in graph.nodes:
        sizes = [(size.node.expr, least) for size, least in _minimal_sizes(node) if isinstance(size, torch.SymInt)]
        for value in pytree.tree_leaves(node.meta.get("val")):
            for size in value.shape if isinstance(value, Tensor) else [value]:
                divisions = size.node.expr.atoms(FloorDiv, Mod, PythonMod) if isinstance(size, torch.SymInt) else ()
                sizes += [(division.args[1], 1) for division in divisions]
        for size, least in sizes:
            factors = [factor.as_base_exp()[0] for factor in sympy.Mul.make_args(size)] if least == 1 else [size]
            yield from ((factor, least) for factor in factors)


def _minimal_sizes(node: Node) -> Iterator[tuple[Any, int]]:
    """Yield (size, minimum) for the heads and tokens of attention, for pooled sizes, and for indexed dimensions."""
    name, given = str(node.target), arguments_of(node)
    shapes = [each.meta["val"].shape for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)]
    if "scaled_dot_product" in name:
        yield from ((size, 1) for shape in shapes[:2] for size in shape[1:-1])  # heads and tokens of queries and keys
    elif "_pool" in name:
        yield from ((size, 1) for size in shapes[0][1:])
    elif node.target is torch.ops.aten.select.int and isinstance(index := given["index"], int):
        yield shapes[0][given["dim"]], index + 1 if index >= 0 else -index


def _check_example(program: ExportedProgram, inputs: list[InputInfo], conditions: list[str]) -> None:
    """Check that the package will accept inputs with the sizes of the example."""
    leaves = pytree.tree_leaves(program.example_inputs)
    shapes = {entry.name: leaf.shape for entry, leaf in zip(inputs, leaves, strict=True) if entry.constant is None}
    try:
        Sizes(inputs, conditions).check(shapes)
    except (PackageError, ValueError) as error:
        raise ValueError(
            f"model: its sizes depend on each other in a way that a package cannot check; fix them "
            f"(dynamic_tokens=False): {error}"
        ) from None


def _named_sizes(program: ExportedProgram, inputs: list[InputInfo]) -> Iterator[tuple[str, str]]:
    """Yield (name, expression) for each size, with the name that it has in the guards of a program."""
    if program.example_inputs is None:
        raise ValueError(
            "model: the program holds no example inputs, without which torch compiles none; export it anew"
        )
    names = program.module_call_graph[0].signature.forward_arg_names or []
    leaves = pytree.tree_leaves_with_path(program.example_inputs)
    for number, ((path, _), entry) in enumerate(zip(leaves, inputs, strict=True)):
        key = path[1]  # the position in args, or the key in kwargs
        argument = names[key.idx] if isinstance(key, pytree.SequenceKey) else getattr(key, "key", "")
        base, _, index = argument.rpartition("_")
        inside = pytree.keystr(path[2:])
        sources = [f"L['{argument}']{inside}", f"L['flat_args'][{number}]"]
        sources += [f"L['{base}'][{index}]{inside}"] if index.isdigit() else []  # an element of *args
        for dim, size in enumerate(entry.shape):
            for source in sources:
                yield f"{source}.size()[{dim}]", str(size if isinstance(size, int) else size[2])
