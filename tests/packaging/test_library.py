"""The C++ operator library: its build, its symbols, and its operators in a Python process."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mglu_ops
from mglu_ops.backends.cpu.build import BuildError
from mglu_ops.files import source_directory
from mglu_ops.formats import ACTIVATION_FORMATS, FORMATS
from mglu_ops.given import Given
from mglu_ops.packaging import generated
from mglu_ops.packaging import library as build
from mglu_ops.packaging.library import build_runtime
from tests.support import reference
from tests.support.budgets import assert_matches
from tests.support.commands import python, run
from tests.support.layers import LOADS, make_down, make_layer, stored_layer
from tests.support.packaging import needs_compiler

pytest_plugins = ["tests.support.packaging"]
pytestmark = [needs_compiler]

Call = tuple[str, tuple[Any, ...]]
"""The name of an operator, and the arguments of a call."""


def symbols(library: Path, which: str) -> list[str]:
    return [line.split()[-1] for line in run(["nm", "-D", which, library]).stdout.splitlines()]


def test_the_library_uses_only_the_stable_interface_of_torch(library: Path) -> None:
    """A C++ symbol of torch would tie the library to one version. Symbols of torch's C interface have no namespace."""
    used = symbols(library, "--undefined-only")
    assert "aoti_torch_library_def" in used
    assert not [name for name in used if re.search(r"_ZN?K?(2at|3c10|5torch|6caffe2)", name)]


def test_the_library_exports_only_names_of_mglu(library: Path) -> None:
    exported = [
        name for name in symbols(library, "--defined-only") if not re.match(r"_Z|_edata|_end|__bss_start", name)
    ]
    assert {"mglu_check_model", "mglu_version"} <= set(exported)
    assert all("mglu_" in name for name in exported), exported


def test_header_and_package_have_one_version() -> None:
    header = (source_directory() / "library/mglu_ops.h").read_text()
    assert re.search(r'#define MGLU_OPS_VERSION "([^"]+)"', header)[1] == mglu_ops.__version__


def test_a_compiler_error_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="unrecognized"):
        build_runtime(tmp_path, flags=["-fno-such-flag"])
    assert not list(tmp_path.iterdir())


def test_the_build_shows_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    build._run(
        ["sh", "-c", "echo -- The compiler; echo '[1/2] Building a'; echo '[2/2] Linking'"], build._show_progress
    )
    assert capsys.readouterr().err == "[1/2] Building a\n[2/2] Linking\n"
    with pytest.raises(BuildError, match=r"failed:\n\[1/2\] Building a\nno such file"):
        build._run(["sh", "-c", "echo '[1/2] Building a'; echo no such file >&2; exit 1"], build._show_progress)


def test_cmake_comes_from_the_path_or_from_its_python_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cmake = tmp_path / "cmake"
    cmake.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build._find_cmake() == str(cmake)
    cmake.unlink()
    assert Path(build._find_cmake()).name == "cmake"


NAMES = [
    *("pack_masks", "pack_logits", "unpack_masks", "forward", "forward_ste"),
    *("experts_forward", "grouped_forward", "experts_down"),
]
"""The operators of the library."""


@pytest.mark.parametrize("path", generated.FILES)
def test_generated_files_are_up_to_date(path: str) -> None:
    written = (source_directory() / path).read_text()
    assert written == generated.text_of(path), "run python -m mglu_ops.packaging.generated"


ALONE = """
import json, sys, torch
torch.ops.load_library(sys.argv[1])
assert "mglu_ops" not in sys.modules
schemas = [str(torch._C._jit_get_schemas_for_operator(f"mglu::{name}")[0]) for name in sys.argv[2:]]
generator = torch.Generator().manual_seed(0)
def freed(tensor):
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy
def draw(*shape, dtype=torch.float32): return torch.randn(shape, generator=generator).to(dtype)
results = []
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    logits, weight, mask_weight = draw(3, 24, 45, dtype=dtype), draw(24, 45, dtype=dtype), draw(2, 5, 3, dtype=dtype)
    logits[0, 0, :4] = torch.tensor([0.0, -0.0, float("nan"), float("inf")])
    x = draw(5, 2, 45, dtype=dtype).transpose(0, 1)
    packed = torch.ops.mglu.pack_masks(logits > 0)
    y = torch.ops.mglu.forward(x, weight.t().contiguous().t(), packed, "gelu", mask_weight)
    y_ste, packed_ste = torch.ops.mglu.forward_ste(x, weight, logits, "gelu", mask_weight)
    assert torch.equal(packed, packed_ste) and torch.equal(y, y_ste)
    assert torch.equal(packed, torch.ops.mglu.pack_logits(logits))
    assert torch.equal(packed, torch.ops.mglu.pack_masks((logits > 0).to(dtype)))
    assert torch.equal(torch.ops.mglu.unpack_masks(packed, 45), logits > 0)
    results.append([packed.flatten().tolist(), y.double().flatten().tolist()])
ops = torch.ops.mglu
for words, call in {
    "activation: got 'swish'": lambda: ops.forward(x, weight, packed, "swish"),
    "x: got last size 44": lambda: ops.forward(x[..., :-1], weight, packed),
    "n_masks=0": lambda: ops.forward(x, weight, packed[..., :0]),
    "float64": lambda: ops.forward(x.double(), weight.double(), packed),
    "neither 0 nor 1": lambda: ops.pack_masks(logits),
    "in_features: got -1": lambda: ops.unpack_masks(packed, -1),
    "weight: got None, must be a tensor": lambda: ops.forward(x, None, packed),
    "x: got a sparse tensor": lambda: ops.forward(x.to_sparse(), weight, packed),
    "weight: got a tensor of shape [24, 45] whose storage has 0 bytes, must have 2160; the storage was resized":
        lambda: ops.forward(x, freed(weight), packed),
    "mask_weights: got a tensor of shape [2, 5, 3] whose storage has 0 bytes":
        lambda: ops.forward(x, weight, packed, "silu", freed(mask_weight)),
    "masks: got a tensor of shape [3, 24, 45] whose storage has 0 bytes": lambda: ops.pack_masks(freed(logits > 0)),
    "mask_logits: got a tensor of shape [3, 24, 45] whose storage has 0 bytes": lambda: ops.pack_logits(freed(logits)),
    "packed_masks: got a tensor of shape [24, 6, 3] whose storage has 0 bytes":
        lambda: ops.unpack_masks(freed(packed), 45),
}.items():
    try: call()
    except Exception as error: assert words in str(error).splitlines()[0], error
    else: raise AssertionError(words)
print(json.dumps([schemas, results]))
"""


def test_the_operators_of_the_library_agree_with_python(library: Path) -> None:
    schemas, results = json.loads(python("-c", ALONE, library, *NAMES))
    assert schemas == [str(getattr(torch.ops.mglu, name).default._schema) for name in NAMES]
    generator = torch.Generator().manual_seed(0)
    for dtype, (packed, y) in zip((torch.float32, torch.float16, torch.bfloat16), results, strict=True):
        shapes = ((3, 24, 45), (24, 45), (2, 5, 3), (5, 2, 45))
        logits, weight, mask_weight, x = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        logits[0, 0, :4] = torch.tensor([0.0, -0.0, float("nan"), float("inf")])
        assert packed == torch.ops.mglu.pack_masks(logits > 0).flatten().tolist()
        expected = reference.forward(x.transpose(0, 1), weight, logits > 0, "gelu", mask_weight)
        result = torch.tensor(y, dtype=torch.float64).view_as(expected)
        assert_matches(result, expected, dtype)
        in_python = torch.ops.mglu.forward(
            x.transpose(0, 1), weight, torch.ops.mglu.pack_masks(logits > 0), "gelu", mask_weight
        )
        assert torch.equal(result, in_python.double()), "the bits are not those of Python's CPU backend"


STORED = """
import sys, torch
torch.ops.load_library(sys.argv[1])
def outcome(name, arguments):
    try: return getattr(torch.ops.mglu, name)(*arguments)
    except Exception as error: return str(error).splitlines()[0]
torch.save([outcome(*call) for call in torch.load(sys.argv[2])], sys.argv[3])
"""


def rounding_calls() -> Iterator[Given]:
    """Yield valid and invalid calls that round x, some with numbers that are hard to round."""
    for name in ACTIVATION_FORMATS["fp8_token"]:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            layer, _ = stored_layer(name, dtype, 7, 70, 137, n_masks=3, activation_format="fp8_token")
            x, info, integers = layer.x, torch.finfo(dtype), torch.arange(137)
            x[0], x[1, 5], x[2, 7], x[3, 9] = 0, math.nan, -math.inf, info.max
            x[4] = integers * max(info.smallest_normal * info.eps, 2**-136)  # the smallest scale, and ties
            x[5], x[5, 0] = x[5] / 100, 448  # the largest number for a scale of 1
            x[6] = integers / 16  # ties: halfway between two fp8 numbers
            yield layer
            yield layer._replace(weight_scale=layer.weight_scale * 2.0**100)  # so that results of x[4] are not 0
            yield layer._replace(x=x.repeat(1, 2)[:, 1:138])
            yield layer._replace(x=x.t().contiguous().t())
            yield layer._replace(x=x[None], mask_weights=None)
            yield layer._replace(x=x[:0], mask_weights=None)
        yield layer._replace(x=x.double())
        yield layer._replace(activation_format="fp7")
    yield stored_layer("fp8_row", torch.float32, 1, 3, 0, 3)[0]._replace(activation_format="fp8_token")
    yield stored_layer("int4_group", torch.float32, 2, 3, 128, 1)[0]._replace(activation_format="fp8_token")


def stored_calls() -> Iterator[Given]:
    """Yield valid and invalid calls with a weight of each format."""
    for name, chosen in FORMATS.items():
        for dtype in (torch.float32,) if chosen.is_dense else (torch.float32, torch.float16, torch.bfloat16):
            for sizes in ((5, 130, 264), (1, 3, 0)):
                yield stored_layer(name, dtype, *sizes, n_masks=3)[0]
        layer, _ = stored_layer(name, torch.float32, 4, 130, 264, 3)
        yield layer._replace(weight=layer.weight.t().contiguous().t(), x=layer.x.view(2, 2, 264), mask_weights=None)
        yield layer._replace(x=layer.x[:, :-1])
        yield layer._replace(weight=layer.weight[None])
        yield layer._replace(weight=torch.ones_like(layer.weight, dtype=torch.bool))
        yield layer._replace(weight_format="fp7")
        if chosen.is_dense:
            yield layer._replace(weight_scale=torch.ones(130))
        else:
            scale = layer.weight_scale
            yield layer._replace(weight_scale=scale.repeat_interleave(2, 0)[::2])
            for wrong in (None, scale[1:], scale[..., None], scale.double()):
                yield layer._replace(weight_scale=wrong)


def outcome(name: str, arguments: Sequence[Any]) -> Tensor | str:
    """Return the result of a call, or the text of its error with dtype names as C++ writes them."""
    try:
        return getattr(torch.ops.mglu, name)(*arguments)
    except (TypeError, ValueError) as error:
        return re.sub(r"torch\.(?!nn)", "", str(error))


def expert_call(given: Given) -> Call:
    x, weight, packed_masks, *rest, ids, offs = given
    name, routing = ("grouped_forward", offs) if ids is None else ("experts_forward", ids)
    return name, (x, weight, packed_masks, routing, *rest)


def expert_calls() -> Iterator[Call]:
    """Yield valid calls of the operators over experts, with few and with many rows per expert."""
    dtypes = torch.float32, torch.float16, torch.bfloat16
    for number, (name, dtype) in enumerate(itertools.product(FORMATS, dtypes)):
        formats = [one for one, stored in ACTIVATION_FORMATS.items() if name in stored]
        for tokens, top_k, experts in ((7, 3, 5), (40, 2, 3)):
            layer = make_layer(
                (tokens,),
                256,
                140,
                routing="ids",
                experts=experts,
                top_k=top_k,
                loads=LOADS[(number + tokens) % len(LOADS)],
                dtype=dtype,
                index_dtype=(torch.int32, torch.int64)[number % 2],
                weighted=tokens == 7,
                weight_format=name,
                activation_format=formats[number % len(formats)],
            )
            yield expert_call(layer.given)
            yield expert_call(layer.sorted_by_expert()[0].given)
            weights = (dtype, torch.float32, torch.float64)[number % 3]
            yield "experts_down", tuple(make_down(layer, name, weights))


def transposed(tensor: Tensor | None) -> Tensor:
    """Return a copy whose last two dimensions are swapped in memory."""
    assert tensor is not None
    return tensor.mT.contiguous().mT


def other_expert_calls() -> Iterator[Call]:
    """Yield valid calls over experts with tensors in other memory layouts, and invalid calls."""
    layer = make_layer((6,), routing="ids", weighted=True)
    given, grouped, down = layer.given, layer.sorted_by_expert()[0].given, make_down(layer)
    x, y, ids, offs, factors = given.x, down.y, given.routing, grouped.routing, down.expert_weights
    weight, masks = given.weight, given.packed_masks
    stored = make_layer((6,), 128, routing="ids", weight_format="fp8_block").given
    large = torch.full((9, 1, 256), 20.0, dtype=torch.float16)  # products of 102400, above float16's range
    large[0, 0, 0] = torch.inf
    yield "experts_down", (large, large[1:, 0][None], torch.zeros(9, 1).int(), torch.full((9, 1), 0.25))
    yield from map(
        expert_call,
        (
            given._replace(**{name: transposed(value) for name, value in given.tensors().items()}),
            given._replace(weight=weight.repeat(1, 2, 1)[:, ::2], packed_masks=masks.repeat(2, 1, 1, 1)[:4]),
            grouped._replace(x=grouped.x.repeat(1, 2)[:, 5:29], mask_weights=transposed(grouped.mask_weights)),
            grouped._replace(offs=torch.tensor([5, 3, -1, 100], dtype=torch.int32)),
            given._replace(x=x[None]),
            given._replace(x=x[:, 1:]),
            *(given._replace(weight=wrong) for wrong in (weight[0], weight[:0], weight.half())),
            given._replace(packed_masks=masks[1:]),
            *(given._replace(expert_ids=wrong) for wrong in (ids.short(), ids[1:], ids[:, :0], ids[0])),
            given._replace(activation="swish"),
            given._replace(weight_format="fp7"),
            given._replace(weight_scale=torch.ones(4, 2)),
            *(stored._replace(weight_scale=wrong) for wrong in (None, torch.ones(()), torch.ones(3, 1, 1))),
            *(grouped._replace(offs=wrong) for wrong in (offs.long(), offs[1:], offs[None])),
        ),
    )
    for call in (
        down._replace(**{name: transposed(value) for name, value in down.tensors().items()}),
        *(down._replace(y=wrong) for wrong in (y[0], y[:, :1], y[..., 1:])),
        *(down._replace(weight=wrong) for wrong in (down.weight[0], down.weight.half())),
        down._replace(expert_ids=ids.short()),
        *(down._replace(expert_weights=wrong) for wrong in (ids, factors[1:], factors[0])),
        down._replace(weight_scale=torch.ones(4, 24)),
        down._replace(weight=down.weight.to(torch.int8), weight_format="int8_row"),
        down._replace(weight_format="fp7"),
    ):
        yield "experts_down", tuple(call)


def test_calls_give_the_bits_and_the_errors_of_python(library: Path, tmp_path: Path) -> None:
    """A single process runs all calls, because starting a process takes longer than the calls."""
    layers = [("forward", tuple(call[:8])) for call in (*stored_calls(), *rounding_calls())]
    calls = [*layers, *expert_calls(), *other_expert_calls()]
    torch.save(calls, tmp_path / "calls.pt")
    python("-c", STORED, library, tmp_path / "calls.pt", tmp_path / "outcomes.pt")
    for (name, arguments), found in zip(calls, torch.load(tmp_path / "outcomes.pt"), strict=True):
        expected = outcome(name, arguments)
        if isinstance(found, str) or isinstance(expected, str):
            assert found == expected
        else:
            words = f"{name}, {[str(one) for one in arguments if not isinstance(one, Tensor)]}, {arguments[0].dtype}"
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=words)


TOGETHER = """
import sys, torch
if sys.argv[2] == "library first": torch.ops.load_library(sys.argv[1])
import mglu_ops
if sys.argv[2] == "python first": torch.ops.load_library(sys.argv[1])
for name in sys.argv[3:]:
    overloads = [schema.overload_name for schema in torch._C._jit_get_schemas_for_operator(f"mglu::{name}")]
    assert overloads.count("") == 1, overloads
    table = torch._C._dispatch_dump_table(f"mglu::{name}")
    (cpu,) = [line for line in table.splitlines() if line.startswith("CPU:")]
    assert "registering.py" in cpu, cpu
torch.manual_seed(0)
layer = mglu_ops.nn.MGLU(20, 6, n_masks=2)
x = torch.randn(3, 20, requires_grad=True)
y = layer(x)
y.sum().backward()
assert x.grad.abs().sum() > 0
frozen = mglu_ops.freeze(layer)
torch.testing.assert_close(torch.func.vmap(frozen)(x[None])[0], y)
assert frozen.to("meta")(torch.empty(4, 20, device="meta")).shape == (4, 6)
print("fine")
"""


@pytest.mark.long
@pytest.mark.parametrize("order", ["library first", "python first"])
def test_operators_are_registered_once(library: Path, order: str) -> None:
    """If Python and the library both register operators, Python's stay, with gradients, vmap rules and fake kernels."""
    assert "fine" in python("-c", TOGETHER, library, order, *NAMES)
