"""Mixtures of MGLU experts: the experts (fused, or in plain PyTorch), their down projections, and the whole layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..given import as_rows
from ..routing import SortedRows
from .arguments import (
    check_dtype,
    check_flags,
    check_int,
    check_masks,
    check_options,
    check_sizes,
    check_x,
    weight_of_linear,
)
from .feed_forward import FeedForwardOptions
from .masked_linear import MaskedLinear, UnroutedOptions
from .mglu import MGLU
from .naive import NaiveMGLU
from .packed_buffers import check_masks_in_use
from .stored_linear import StoredLinear

if TYPE_CHECKING:
    from typing_extensions import Unpack

TensorOrNone = TypeVar("TensorOrNone", Tensor, Tensor | None)


class OnRank:
    """A module that `mglu_ops.parallel.ParallelExperts` may divide over ranks."""

    first_expert: int | None = None
    """The number of this rank's first expert; None unless `mglu_ops.parallel.ParallelExperts` has divided the layer."""
    ranks_of_tokens: int | None = None
    """The number of ranks if each rank has its own tokens; None if all ranks have the same x. Ranks with their own
    tokens exchange rows of x as plain tensors, so only `MGLUExpertsFeedForward`, which exchanges them, may call the
    layer."""

    def on_rank(self, tensor: TensorOrNone) -> TensorOrNone:
        """The local part of a DTensor if the layer is divided over ranks; otherwise the tensor, unchanged.

        The gradient of a replicated tensor is summed over the ranks. The gradient of a sharded tensor needs no sum,
        since each rank computes the gradient of its shard for all tokens. If each rank has its own tokens, as in
        data-parallel training, gradients are divided by the number of ranks, because data-parallel training averages
        the gradients of the rest of the model over the ranks.
        """
        if self.first_expert is None or tensor is None:
            return tensor
        from torch.distributed.tensor import DTensor, Partial

        if not isinstance(tensor, DTensor):
            if self.ranks_of_tokens is not None:
                return tensor
            raise TypeError(
                f"{type(self).__name__}: got a {type(tensor).__name__} in a layer that ParallelExperts has divided, "
                "must be a DTensor: call the MGLUExpertsFeedForward, and not the experts in it"
            )
        placements = [Partial() if placement.is_replicate() else placement for placement in tensor.placements]
        local = tensor.to_local(grad_placements=placements)
        ranks = self.ranks_of_tokens
        if ranks is not None and local.requires_grad:
            local.register_hook(lambda gradient: gradient / ranks)
        return local


class _Stack(OnRank, StoredLinear):
    """One linear layer per expert. The weights of the layers are stacked in one tensor."""

    num_experts: int

    def __init__(self, num_experts: int, in_features: int, out_features: int, **options: Any) -> None:
        check_sizes(num_experts=num_experts)
        self.num_experts = num_experts  # set first, because the shapes of the parameters depend on it
        super().__init__(in_features, out_features, **options)


class _Experts(_Stack, MaskedLinear):
    """The base class of `MGLUExperts` and `NaiveMGLUExperts`."""

    def check_inputs(self, x: Tensor, expert_ids: Tensor) -> None:
        """Check x as `MGLU` does, the metadata of the expert ids, and packed masks at their first use.

        Raises:
            TypeError: the ids are not an int32 or int64 tensor.
            ValueError: the ids are not on x's device, or their leading sizes differ from x's.
        """
        self.check_input(x)
        if not isinstance(expert_ids, Tensor):
            raise TypeError(f"expert_ids: got {type(expert_ids).__name__}, must be a tensor")
        if expert_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"expert_ids: got dtype {expert_ids.dtype}, must be torch.int32 or torch.int64")
        if expert_ids.device != x.device:
            raise ValueError(f"expert_ids: got device {expert_ids.device}, must be x's device {x.device}")
        is_like_x = x.dim() > 0 and expert_ids.dim() == x.dim() and expert_ids.shape[:-1] == x.shape[:-1]
        if not is_like_x or expert_ids.shape[-1] == 0:
            expected = ", ".join([*map(str, x.shape[:-1]), "K"])
            raise ValueError(
                f"expert_ids: got shape {list(expert_ids.shape)}, must be [{expected}] with K of at least 1"
            )
        if self.packed_masks is not None:
            check_masks_in_use(self, self.packed_masks)


class MGLUExperts(_Experts, MGLU):
    """The experts of a mixture. Each expert is an `MGLU` layer. One Parameter holds the weights of all experts.

        y[t, k] = MGLU of expert `expert_ids[t, k]` (x[t])

    Options, checks on loading, `mglu_ops.freeze` and `mglu_ops.quantize` are as for `MGLU`, and each expert is
    initialised as an `MGLU`. The `state_dict` has the same keys. Its tensors have num_experts as first size, except the
    router of masks, which all experts share.

    Args:
        num_experts: number of experts, at least 1.
        in_features: last size of x, at least 1.
        out_features: last size of the result, at least 1.
        options: the keyword arguments of `MGLU`. `top_k` is the number of masks that a token keeps in each expert, and
            not the number of experts.

    Attributes:
        weight: Parameter `[num_experts, out_features, in_features]`.
        weight_scale: Parameter of the scales, `[num_experts, ...]`; None if the weight is dense.
        mask_logits: Parameter `[num_experts, n_masks, out_features, in_features]`; None if the masks are fixed.
        packed_masks: buffer `uint8 [num_experts, out_features, ceil(in_features / 8), n_masks]`; None if learnable.
        router: `nn.Linear(in_features, n_masks, bias=False)`, the router of masks; None without `top_k`.

    Raises:
        ValueError: an argument is out of range or of another type.
    """

    _leading_names: ClassVar[tuple[str, ...]] = ("num_experts",)

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, **options: Unpack[FeedForwardOptions]
    ) -> None:
        super().__init__(num_experts, in_features, out_features, **options)

    def forward(self, x: Tensor, expert_ids: Tensor) -> Tensor:  # type: ignore[override] # an MGLU has no ids
        """Map x `[..., in_features]` to `[..., K, out_features]`. Under autocast, the result has autocast's dtype.

        No shape depends on the values of the ids. The host waits for a GPU only in float64, without Triton, or
        below compute capability 8.0.

        Args:
            x: `[..., in_features]`.
            expert_ids: int32 or int64 `[..., K]`, the experts of each token; duplicates are allowed. An id outside of
                `0 ... num_experts - 1` gives a row of zeros, without gradients.

        Raises:
            TypeError: as in `MGLU`, or `expert_ids` is not an int32 or int64 tensor.
            ValueError: as in `MGLU`, or the device or the leading sizes of `expert_ids` differ from x's.
        """
        self.check_inputs(x, expert_ids)
        mask_weights = self.on_rank(self.mask_weights(x))
        weights = None if mask_weights is None else as_rows(mask_weights)
        weight, logits, masks, scale = self._tensors()
        stored = self.on_rank(weight), self.on_rank(logits), self.on_rank(masks), self.on_rank(scale)
        given = (as_rows(self.on_rank(x)), weights, as_rows(expert_ids), *stored)
        y = self._run(self._route, *given)
        return y.view(*expert_ids.shape, y.shape[-1])

    def _route(
        self,
        x: Tensor,
        mask_weights: Tensor | None,
        expert_ids: Tensor,
        weight: Tensor,
        mask_logits: Tensor | None,
        packed_masks: Tensor | None,
        scale: Tensor | None,
    ) -> Tensor:
        """Compute the result, `[tokens, K, out_features]` or `[tokens * K, out_features]`."""
        if packed_masks is not None:
            weights = None if mask_weights is None else mask_weights.unsqueeze(1).expand(-1, expert_ids.shape[1], -1)
            given = (x, weight, packed_masks, expert_ids, self.activation, weights)
            return ops.experts_forward(*given, scale, self.weight_format, self.activation_format)
        rows = SortedRows(expert_ids, weight.shape[0])
        weights = None if mask_weights is None else rows.of_tokens(mask_weights)
        y, _ = ops.grouped_forward_ste(rows.of_tokens(x), weight, mask_logits, rows.offs, self.activation, weights)
        return rows.put_back(y)


class NaiveMGLUExperts(_Experts, NaiveMGLU):
    """`MGLUExperts` in plain PyTorch: a loop over the experts around `NaiveMGLU`'s loop over the masks.

    Constructor and `state_dict` are as in `MGLUExperts`, with the options of `NaiveMGLU`. The host waits for the device
    once per expert. `mglu_ops.freeze` turns the layer into an `MGLUExperts`.

    Args:
        num_experts, in_features, out_features: as in `MGLUExperts`.
        options: the keyword arguments of `NaiveMGLU`.

    Attributes:
        gate_bias, value_bias: Parameters `[num_experts, out_features]`; None without `bias`.

    Raises:
        ValueError: an argument is out of range or of another type.
    """

    def forward(self, x: Tensor, expert_ids: Tensor) -> Tensor:  # type: ignore[override] # a NaiveMGLU has no ids
        """Map x `[..., in_features]` to `[..., K, out_features]`.

        Raises:
            TypeError, ValueError: as in `MGLUExperts`.
        """
        self.check_inputs(x, expert_ids)
        mask_weights = self.mask_weights(x)
        rows, ids = as_rows(x), as_rows(expert_ids)
        weights = None if mask_weights is None else as_rows(mask_weights)
        places, results = [], []
        for expert in range(self.num_experts):
            token, k = torch.where(ids == expert)
            places.append((token, k))
            results.append(self._project(rows[token], None if weights is None else weights[token], expert))
        y = results[0].new_zeros(*ids.shape, self.out_features)
        for place, result in zip(places, results, strict=True):
            y[place] = result
        return y.view(*expert_ids.shape, self.out_features)


class ExpertsDown(_Stack):
    """The down projections of a mixture: one linear layer per expert, and the weighted sum over a token's experts.

        out[t] = sum_k expert_weights[t, k] * (W[expert_ids[t, k]] y[t, k])

    `mglu_ops.quantize` quantizes W too.

    Args:
        num_experts: number of experts, at least 1.
        in_features: last size of y, at least 1.
        out_features: last size of the result, at least 1.
        weight_format: the format of the stored weight, a name in `mglu_ops.formats.FORMATS`.
        device: device of the parameters.
        dtype: dtype of a dense weight.

    Attributes:
        weight: Parameter W `[num_experts, out_features, in_features]`; each expert's is initialised as in `nn.Linear`.
        weight_scale: Parameter of the scales, `[num_experts, ...]`; None if the weight is dense.

    Raises:
        ValueError: an argument is out of range or of another type.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        weight_format: str = "dense",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options = {"weight_format": weight_format, "device": device, "dtype": dtype}
        super().__init__(num_experts, in_features, out_features, **options)
        self.reset_parameters()

    def forward(self, y: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Return the weighted sums `[tokens, out_features]`.

        Args:
            y: `[tokens, K, in_features]`.
            expert_ids: int32 or int64 `[tokens, K]`. An id outside of `0 ... num_experts - 1` contributes nothing.
            expert_weights: floating `[tokens, K]`.

        Raises:
            TypeError, ValueError: as in `mglu::experts_down`; or a quantized weight was replaced without its scales.
        """
        check_x(y, self._parameters.get("weight"), None, takes_dtype=self.weight_format == "dense", name="y")
        for name, tensor in (("expert_ids", expert_ids), ("expert_weights", expert_weights)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name}: got {type(tensor).__name__}, must be a tensor")
        if self.weight_format != "dense":
            self.check_pair()
        weight, scale = self.on_rank(self.weight), self.on_rank(self.weight_scale)
        return ops.experts_down(y, weight, expert_ids, expert_weights, scale, self.weight_format)

    def extra_repr(self) -> str:
        stored = "" if self.weight_format == "dense" else f", weight_format={self.weight_format!r}"
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"num_experts={self.num_experts}, {sizes}{stored}"


class ExpertsFeedForwardOptions(UnroutedOptions, total=False):
    """The options that `MGLUExpertsFeedForward` passes to its `MGLUExperts`."""

    save_activations: bool


def weighted_sum(layer: MGLUExpertsFeedForward, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
    """The result `[tokens, hidden_size]` for x `[tokens, hidden_size]`, expert ids and expert weights `[tokens, K]`.

    A rank that holds only some experts sums over the experts that it holds.
    """
    if layer.first_expert:
        expert_ids = expert_ids - layer.first_expert  # the ids of other ranks' experts are then out of range
    return layer.down_proj(layer.experts(x, expert_ids), expert_ids, expert_weights)


class MGLUExpertsFeedForward(OnRank, nn.Module):
    """The feed-forward layer of a mixture of experts: a router, `MGLUExperts`, and their down projections.

        p = softmax(x G^T),   y = sum_k p_{e_k} * (MGLU of expert e_k (x)) D_{e_k}^T

    e_1 to e_top_k are the experts with the largest p. As in Qwen3-MoE and Mixtral, the softmax is over all experts and
    is computed in float32.

    Args:
        num_experts: number of experts, at least 1.
        hidden_size: size of x and of the result, at least 1.
        intermediate_size: size of an expert's hidden layer, at least 1.
        top_k: number of experts of a token, 1 to num_experts.
        norm_topk_prob: divide the weights of a token's experts by their sum.
        mask_top_k: number of masks that a token keeps, `top_k` of `MGLUExperts`.
        options: the keyword arguments of `MGLU`. `device` and `dtype` also apply to `gate` and `down_proj`,
            `weight_format` also to `down_proj`, as in `mglu_ops.quantize`, and `activation_format` only to `experts`.

    Attributes:
        gate: `nn.Linear(hidden_size, num_experts, bias=False)`, the router G.
        experts: `MGLUExperts(num_experts, hidden_size, intermediate_size, ...)`.
        down_proj: `ExpertsDown(num_experts, intermediate_size, hidden_size)`, whose weight is D.

    Raises:
        ValueError: an argument is out of range or of another type.
    """

    combine: Callable[[MGLUExpertsFeedForward, Tensor, Tensor, Tensor], Tensor] = staticmethod(weighted_sum)
    """Computes and sums the results of a token's experts. `mglu_ops.parallel` replaces it to exchange tokens."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        top_k: int,
        *,
        norm_topk_prob: bool = True,
        mask_top_k: int | None = None,
        **options: Unpack[ExpertsFeedForwardOptions],
    ) -> None:
        check_options(self, options, ExpertsFeedForwardOptions)
        check_sizes(num_experts=num_experts, hidden_size=hidden_size, intermediate_size=intermediate_size)
        check_int("top_k", top_k, num_experts, f"an int from 1 to num_experts={num_experts}")
        check_flags(norm_topk_prob=norm_topk_prob)
        # `MGLUExperts` checks it too, but calls it top_k, which is another argument of this class.
        check_masks(options.get("n_masks", 1), options.get("learnable_masks", True), mask_top_k, "mask_top_k")
        super().__init__()
        self.hidden_size, self.top_k, self.norm_topk_prob = hidden_size, top_k, norm_topk_prob
        check_dtype(options.get("dtype"))
        kind: dict[str, Any] = {"device": options.get("device"), "dtype": options.get("dtype")}
        self.gate = nn.Linear(hidden_size, num_experts, bias=False, **kind)
        self.experts = MGLUExperts(num_experts, hidden_size, intermediate_size, top_k=mask_top_k, **options)
        kind["weight_format"] = self.experts.weight_format
        self.down_proj = ExpertsDown(num_experts, intermediate_size, hidden_size, **kind)

    def reset_parameters(self) -> None:
        self.experts.reset_parameters()
        self.gate.reset_parameters()
        self.down_proj.reset_parameters()

    def forward(self, x: Tensor, output_router_logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Map x `[..., hidden_size]` to `[..., hidden_size]`.

        Args:
            x: `[..., hidden_size]`.
            output_router_logits: also return the router logits `[..., num_experts]`, for a load-balancing loss.

        Raises:
            TypeError, ValueError: as in `MGLUExperts`.
        """
        check_x(x, weight_of_linear(self.gate), self.hidden_size, name_of_size="hidden_size")
        logits = self.gate(x)
        weights, ids = route(self.on_rank(logits), self.top_k, self.norm_topk_prob)
        y = self.combine(self, as_rows(x), as_rows(ids), as_rows(weights))
        y = torch.ops.aten._unsafe_view(y, x.shape)  # FSDP warns if a module returns a view
        return (y, logits) if output_router_logits else y

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, norm_topk_prob={self.norm_topk_prob}"


def route(logits: Tensor, top_k: int, norm_topk_prob: bool) -> tuple[Tensor, Tensor]:
    """Choose experts: return their weights, in the logits' dtype, and their ids, both `[..., top_k]`.

    `logits` is `[..., num_experts]`; `MGLUExpertsFeedForward` describes the other arguments.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    weights, ids = F.softmax(logits, dim=-1, dtype=wide).topk(top_k, dim=-1)
    if norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), ids
