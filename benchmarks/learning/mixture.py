"""A feed-forward layer that is a mixture of experts: a router, the experts, and a loss that balances their load."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mglu_ops.activations import get_activation
from mglu_ops.nn import MGLUExperts
from mglu_ops.nn.experts import route
from mglu_ops.routing import sort_pairs

BALANCE = 0.01
"""The weight of the loss that balances the load, as in Switch Transformers (arXiv 2101.03961)."""


class ExpertLinear(nn.Module):
    """A linear layer for each expert, computed by one grouped product and initialised like `nn.Linear`."""

    def __init__(self, experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features))
        nn.init.uniform_(self.weight, -(in_features**-0.5), in_features**-0.5)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Map x `[rows, in_features]`, whose rows are sorted by expert; `ends` is `offs` of `grouped_mm`."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        return F.grouped_mm(x.to(dtype), self.weight.to(dtype).mT, offs=ends)


class GLUExperts(nn.Module):
    """The first halves of experts without masks: GLU, or one matrix and an activation."""

    def __init__(self, experts: int, hidden: int, intermediate: int, activation: str, gated: bool) -> None:
        super().__init__()
        self.activate = get_activation(activation).forward
        self.gate_proj = ExpertLinear(experts, hidden, intermediate)
        self.up_proj = ExpertLinear(experts, hidden, intermediate) if gated else None

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        gate = self.activate(self.gate_proj(x, ends))
        return gate if self.up_proj is None else gate * self.up_proj(x, ends)


class Mixture(nn.Module):
    """A mixture of experts. The router takes softmax, then top-k, and scales the weights of a token to a sum of 1.

    The model's loss gets a term `BALANCE * balance(logits, ids)` for each mixture. It affects only gradients: the value
    of the loss does not contain it.

    Args:
        experts: number of experts.
        active: the number of experts of a token.
        hidden: size of x and of the result.
        intermediate: size of an expert's hidden layer.
        layer: the first half of an expert, "lu", "glu" or "mglu" as in `recipe.Layer`.
        activation: the argument of `mglu_ops.nn.MGLU`.
        masked: for "mglu", the other options of `mglu_ops.nn.MGLUExperts`.
    """

    def __init__(
        self, experts: int, active: int, hidden: int, intermediate: int, layer: str, activation: str, **masked: Any
    ) -> None:
        super().__init__()
        self.experts, self.active = experts, active
        self.router = nn.Linear(hidden, experts, bias=False)
        self.projection: MGLUExperts | GLUExperts
        if layer == "mglu":
            self.projection = MGLUExperts(experts, hidden, intermediate, activation=activation, **masked)
        else:
            self.projection = GLUExperts(experts, hidden, intermediate, activation, gated=layer == "glu")
        self.down = ExpertLinear(experts, intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., hidden]` to the same shape."""
        rows = x.flatten(0, -2)
        logits = self.router(rows)
        weights, ids = route(logits, self.active, norm_topk_prob=True)
        if torch.is_grad_enabled():
            weights = _WithLoss.apply(weights, BALANCE * balance(logits, ids))
        order, ends = sort_pairs(ids, self.experts)
        tokens = order // self.active
        given = rows[tokens]
        if isinstance(self.projection, MGLUExperts):
            hidden = self.projection(given, ids.flatten()[order, None])[:, 0]
        else:
            hidden = self.projection(given, ends)
        outputs = self.down(hidden, ends) * weights.flatten()[order, None]
        return outputs.new_zeros(rows.shape).index_add(0, tokens, outputs).view(x.shape)


def balance(logits: Tensor, ids: Tensor) -> Tensor:
    """The loss that balances the load: `experts * sum(load * probability)`, summed over experts.

    The load of an expert is its fraction of `ids` `[tokens, active]`. Its probability is the mean softmax of
    `logits` `[tokens, experts]`. The result is 1 for a balanced load, and at most the number of experts.
    """
    experts = logits.shape[-1]
    load = F.one_hot(ids, experts).float().mean((0, 1))
    return experts * (load * F.softmax(logits, dim=-1, dtype=torch.float32).mean(0)).sum()


class _WithLoss(torch.autograd.Function):
    """Returns x. In the backward pass, `loss` gets the gradient 1, as if it were a term of the model's loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones((), dtype=torch.float32)


def expert_weights(model: nn.Module) -> int:
    """The number of weights of all experts of a model, without mask logits and routers."""
    mixtures = [module for module in model.modules() if isinstance(module, Mixture)]
    return sum(
        parameter.numel()
        for mixture in mixtures
        for name, parameter in mixture.named_parameters()
        if name.endswith("weight") and "router" not in name
    )
