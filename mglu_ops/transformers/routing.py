"""The load-balancing loss of Top-K routing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils.generic import can_return_tuple

if TYPE_CHECKING:  # the class after the mixin in the list of bases
    from transformers import PreTrainedModel as _Model
else:
    _Model = object


class RoutedForwardMixin(_Model):
    """Adds the load-balancing loss to the loss of a language model in training."""

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """Run the model as its base class does.

        The cache is among `kwargs`, since its name depends on the version of Transformers.

        In training, with `labels` and `router_aux_loss_coef > 0`, the result is a `MoeCausalLMOutputWithPast`:
        `aux_loss` is the load-balancing loss, and `loss` the language model's loss plus
        `router_aux_loss_coef * aux_loss`. In evaluation, `loss` is the language model's alone.
        """
        inputs: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
            **kwargs,
        }
        if labels is None or not self.training or self.config.router_aux_loss_coef == 0:
            return super().forward(labels=labels, logits_to_keep=logits_to_keep, **inputs)
        outputs = self.model(**inputs, output_router_logits=True, return_dict=True)
        return self._with_balance(outputs, labels, logits_to_keep, attention_mask, kwargs)

    def _with_balance(
        self,
        outputs: Any,
        labels: Tensor,
        logits_to_keep: int | Tensor,
        attention_mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> MoeCausalLMOutputWithPast:
        config: Any = self.config
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=config.vocab_size, **kwargs)
        balance = load_balancing_loss(outputs.router_logits, config.n_masks, config.mask_top_k, attention_mask)
        # Trainer divides the loss by the number of tokens in all batches that it accumulates, so this loss is scaled in
        # the same way.
        in_all = kwargs.get("num_items_in_batch")
        share = 1 if in_all is None else (labels[:, 1:] != -100).sum() / in_all
        rest = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return MoeCausalLMOutputWithPast(
            loss=loss + config.router_aux_loss_coef * share * balance.to(loss.device),
            aux_loss=balance,
            logits=logits,
            **rest,
        )


def load_balancing_loss(
    router_logits: tuple[Tensor, ...], n_masks: int, top_k: int, attention_mask: Tensor | None = None
) -> Tensor:
    """Compute the load-balancing loss of the Switch Transformer (arXiv 2101.03961, eq. 4 to 6), a mean over layers.

        n_masks * sum_i f_i P_i

    f_i is the number of tokens that keep mask i, divided by the number of tokens, and P_i the mean probability of mask
    i in the softmax over all masks. If all masks are used alike, the loss is top_k.

    Args:
        router_logits: the logits `[batch, length, n_masks]` of the router of each layer.
        n_masks: number of masks.
        top_k: number of masks that a token keeps.
        attention_mask: `[batch, length]`, 0 for padding, which does not count; another shape is ignored.

    Returns:
        A scalar.

    Raises:
        RuntimeError: gradients are recorded, but not for the routers, as under a reentrant checkpoint.
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
