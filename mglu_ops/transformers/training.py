"""Training with `transformers.Trainer`: an optimizer that knows mask logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_optimizer import is_optimizer_factory

from .. import notices
from ..nn import check_mask_lr, parameter_groups

_GROUPS_OF_THEIR_OWN = {"params", "model", "optimizer_dict"}
"""Arguments that show that an optimizer, such as GaLore or LOMO, chooses its parameters itself."""


if TYPE_CHECKING:  # a class that derives from the mixin also derives from Trainer
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class MGLUTrainerMixin(_Trainer):
    """Gives mask logits no weight decay, and their own learning rate. Put this mixin before your Trainer class.

    `Trainer` alone decays all parameters but norms and biases, and so it would decay logits. This mixin gets the groups
    from `mglu_ops.nn.parameter_groups`: `weights` with the `learning_rate` and `weight_decay` of the arguments,
    `no_decay` without decay, and `mask_logits` without decay and with `mask_lr`. The schedules of `Trainer` scale all
    rates alike. If a scheduler of your own has overwritten the masks' rate, there is a warning
    (`mglu_ops.nn.check_mask_lr`).

    Args:
        mask_lr: learning rate of mask logits; None for `learning_rate`, or for 0.3 times `learning_rate` if the model's
            configuration says `weight_init="leveled"`. Other arguments are the Trainer's.

    Raises:
        ValueError: the model has a load-balancing loss, but the Trainer would compute the loss itself and leave out
            the load-balancing loss.
    """

    optimizer: torch.optim.Optimizer | None

    def __init__(self, *args: Any, mask_lr: float | None = None, **kwargs: Any) -> None:
        self.mask_lr = mask_lr
        super().__init__(*args, **kwargs)
        config = getattr(self.model, "config", None)
        coefficient = getattr(config, "router_aux_loss_coef", 0)
        # A mixture adds its load-balancing loss only if output_router_logits is True.
        has_balance = coefficient and getattr(config, "output_router_logits", True)
        if has_balance and (self.label_smoother is not None or self.compute_loss_func is not None):
            raise ValueError(
                f"router_aux_loss_coef: got {coefficient} with label_smoothing_factor or compute_loss_func, must be 0: "
                "Trainer then takes the labels away from the model, which adds no load-balancing loss to its loss"
            )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer that the training arguments name, with the groups of `parameter_groups`.

        Raises:
            ValueError: the optimizer of the arguments (`optim`) does not accept parameter groups.
        """
        if self.optimizer is None:
            trained = self.model if model is None else model
            cls, kwargs = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, trained)
            if is_optimizer_factory(cls) or _GROUPS_OF_THEIR_OWN & set(kwargs):
                raise ValueError(
                    f"optim: got {self.args.optim!r}, must be an optimizer that takes parameter groups, "
                    "such as 'adamw_torch'"
                )
            rates = {"lr": self.args.learning_rate, "mask_lr": self.mask_lr}
            groups = parameter_groups(trained, weight_decay=self.args.weight_decay, **rates)
            self.optimizer = cls(groups, **kwargs)
        return super().create_optimizer(model)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Create the scheduler that the arguments name, unless there is one already.

        Warn if the scheduler has overwritten the masks' rate.
        """
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        scheduled = self.optimizer if optimizer is None else optimizer
        try:
            if hasattr(scheduled, "param_groups"):  # DeepSpeed makes the optimizer later
                check_mask_lr(scheduled)
        except ValueError as error:
            notices.warn(f"{type(self).__name__}: {error}", stacklevel=2)
        return scheduler


class MGLUTrainer(MGLUTrainerMixin, Trainer):
    """`transformers.Trainer` with `MGLUTrainerMixin`."""
