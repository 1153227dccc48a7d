"""The load-balancing loss of Top-K routing."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func


def load_balancing_loss(
    router_logits: tuple[Tensor, ...], n_masks: int, top_k: int, attention_mask: Tensor | None = None
) -> Tensor:
    """Compute the load-balancing loss of the Switch Transformer (arXiv 2101.03961, eq. 4 to 6), a mean over layers.

        n_masks * sum_i f_i P_i

    f_i is the fraction of the tokens that keep mask i. P_i is the mean probability of mask i in the softmax over all
    masks. If all masks are used alike, the loss is top_k.

    Args:
        router_logits: the logits `[batch, length, n_masks]` of the router of each layer.
        n_masks: number of masks.
        top_k: number of masks that a token keeps.
        attention_mask: `[batch, length]`, 0 for padding, which does not count; another shape is ignored.

    Returns:
        A scalar.

    Raises:
        RuntimeError: gradients are recorded, but the logits have none. A reentrant checkpoint causes this.
    """
    if torch.is_grad_enabled() and not all(logits.requires_grad for logits in router_logits):
        raise RuntimeError(
            "router_aux_loss_coef: the logits of the routers have no gradient, so that the load-balancing loss cannot "
            'train them; use gradient checkpointing with {"use_reentrant": False}, or set router_aux_loss_coef to 0'
        )
    is_padding_mask = attention_mask is not None and attention_mask.shape == router_logits[0].shape[:-1]
    mask = attention_mask if is_padding_mask else None
    losses = [load_balancing_loss_func((logits.flatten(0, -2),), n_masks, top_k, mask) for logits in router_logits]
    return torch.stack(losses).mean()
