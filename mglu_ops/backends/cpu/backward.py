"""The backward pass in bfloat16 on CPUs that multiply bfloat16: torch's GEMMs, and elementwise steps in C++.

With AVX512-BF16, the GEMMs take a third of the time of the float32 GEMMs of the backend `composite`.

dx is computed in chunks of tokens, and all D_i in chunks of output features (`backends.gradients` defines them). Each
element of dx and of D_i is the result of one GEMM, and is rounded once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ...call import Call
from ...given import BackwardGiven
from ...masks import n_masks_of
from .. import gradients
from ..base import Reason
from ..gradients import Part, Steps, with_contiguous_columns
from ..parameters import addresses
from .library import DTYPES, Library, load, packer

_CHUNK_ELEMENTS = 1 << 24
"""The most elements of a chunk (32 MB), which holds either dt and all b_i, or D_0 and all D_i. In smaller chunks, GEMMs
repack their operands too often (csrc/cpu/README.md)."""

_CHUNK_MULTIPLE = 64
"""Chunks have a multiple of this many tokens or output features, so that rows fill whole cache lines."""


def reason(call: Call) -> Reason | None:
    """Return the reason why `run` does not take a call; None if it does.

    It takes a call if torch's GEMMs are faster in bfloat16 than in float32.
    """
    is_for_bfloat16 = call.dtype is torch.bfloat16 and torch.backends.mkldnn.is_available()
    # `load` is called last, because it may build the kernels.
    if is_for_bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        library = load()
        if isinstance(library, str):
            return Reason(library, is_loss=False, is_passing=True)
        if library.supports("avx512_bf16", torch.bfloat16):
            return None
    return Reason("no kernel for this backward pass", is_loss=False)


def run(library: Library, given: BackwardGiven) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `mglu::backward`. Thread-safe; the same inputs give the same bits."""
    given = given._replace(
        grad_output=with_contiguous_columns(given.grad_output),
        x=given.x.contiguous(),
        weight=with_contiguous_columns(given.weight),
        packed_masks=given.packed_masks.contiguous(),
    )
    return gradients.backward(CpuSteps(library), given)


class CpuSteps(Steps):
    """The steps of a layer. The elementwise ones are in C++ (csrc/cpu/backward.h), each one pass over memory.

    The elements of a row are contiguous, and rows may have any stride. Packed masks and results are contiguous. The dt
    and b_i of all parts have the same memory.
    """

    logits_dtypes: ClassVar[Collection[torch.dtype]] = (torch.bfloat16,)

    def __init__(self, library: Library) -> None:
        self._library = library
        self._memory = torch.empty(0, dtype=torch.bfloat16)

    def _run(self, name: str, tensors: Mapping[str, Tensor | None], **integers: int) -> None:
        """Run a step. Its struct in csrc/cpu/backward.h has the step's name in camel case."""
        pack = packer(name.title().replace("_", ""), integers, "backward.h")
        self._library.run(name, pack(addresses(**tensors)))

    def parts(self, entries: int, tokens: int, out_features: int, in_features: int) -> Sequence[Part]:
        of_x = _chunks(tokens, entries * out_features)
        of_weight = _chunks(out_features, entries * max(tokens, in_features))
        every = slice(0, tokens), slice(0, out_features)
        if len(of_x) == len(of_weight) == 1:
            return [Part(*every)]
        return [
            *(Part(one, every[1], of_weight=False) for one in of_x),
            *(Part(every[0], one, of_x=False) for one in of_weight),
        ]

    def scale(self, grad_output: Tensor, partials: Tensor) -> Tensor:
        if self._memory.numel() < partials.numel():
            self._memory = partials.new_empty(partials.numel())
        out = self._memory[: partials.numel()].view(partials.shape)
        self._run(
            "scale",
            {"grad_output": grad_output, "partials": partials, "out": out},
            **dict(zip(("tokens", "entries", "columns"), partials.shape, strict=True)),
            grad_stride=grad_output.stride(0),
            partials_stride=partials.stride(0),
            entry_stride=partials.stride(1),
        )
        return out

    def flip_signs(self, weight: Tensor, packed_masks: Tensor) -> Tensor:
        n_masks, (d, h) = n_masks_of(packed_masks), weight.shape
        flipped = weight.new_empty(n_masks + 1, d, h)
        tensors = {"weight": weight, "packed_masks": packed_masks, "out": flipped}
        sizes = {"n_masks": n_masks, "out_features": d, "in_features": h}
        self._run("flip_signs", tensors, **sizes, weight_stride=weight.stride(0))
        return flipped

    def wide_product(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a.float(), b.float())

    def weight_gradients(
        self,
        total: Tensor | None,
        products: Tensor,
        weight: Tensor,
        packed_masks: Tensor,
        grad_weight: Tensor | None,
        grad_logits: Tensor | None,
    ) -> None:
        """Write dW from D_0, which may be in float32, and the D_i, and dlogits, whose matrices may lie apart."""
        tensors = {
            "total": total,
            "products": products,
            "weight": weight,
            "packed_masks": packed_masks,
            "grad_weight": grad_weight,
            "grad_logits": grad_logits,
        }
        self._run(
            "weight_gradients",
            tensors,
            **dict(zip(("n_masks", "out_features", "in_features"), products.shape, strict=True)),
            weight_stride=weight.stride(0),
            logits_stride=0 if grad_logits is None else grad_logits.stride(0),
            total_dtype=DTYPES[torch.float32 if total is None else total.dtype],
            logits_dtype=DTYPES[torch.float32 if grad_logits is None else grad_logits.dtype],
        )

    def mask_weight_gradients(self, grad_output: Tensor, terms: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        sums = terms.new_empty(terms.shape[:2], dtype=torch.float32)
        self._run(
            "mask_weight_gradients",
            {"grad_output": grad_output, "terms": terms, "out": sums},
            **dict(zip(("tokens", "n_masks", "columns"), terms.shape, strict=True)),
            grad_stride=grad_output.stride(0),
            terms_stride=terms.stride(0),
            mask_stride=terms.stride(1),
        )
        return sums


def _chunks(size: int, elements_each: int) -> list[slice]:
    """Divide tokens or output features into at least one chunk. Each of them takes `elements_each` elements."""
    fit = _CHUNK_ELEMENTS // max(elements_each, 1) // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE
    step = max(fit, _CHUNK_MULTIPLE)
    return [slice(start, min(start + step, size)) for start in range(0, max(size, 1), step)]
