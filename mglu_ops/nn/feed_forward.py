"""Feed-forward blocks: the MGLU projection followed by the output projection."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from .arguments import check_options, check_sizes
from .masked_linear import MaskedOptions
from .mglu import MGLU

if TYPE_CHECKING:
    from typing_extensions import Unpack


class FeedForwardOptions(MaskedOptions, total=False):
    """The options of `MGLUFeedForward`."""

    save_activations: bool


class MGLUFeedForward(nn.Module):
    """`down_proj(mglu(x))`: the feed-forward layer of a transformer block, without biases.

    Args:
        hidden: size of x and of the result, at least 1.
        intermediate: size of the hidden layer between the two projections, at least 1.
        options: the keyword arguments of `MGLU`. `device` and `dtype` also apply to `down_proj`; `weight_format` and
            `activation_format` apply only to the MGLU layer.

    Attributes:
        mglu: `MGLU(hidden, intermediate, ...)`.
        down_proj: `nn.Linear(intermediate, hidden, bias=False)`.

    Raises:
        ValueError: an argument is out of range or of another type.
    """

    _activation: ClassVar[str | None] = None  # the only activation of a subclass that fixes it

    def __init__(self, hidden: int, intermediate: int, **options: Unpack[FeedForwardOptions]) -> None:
        check_options(self, options, FeedForwardOptions)
        if self._activation is not None and options.setdefault("activation", self._activation) != self._activation:
            raise ValueError(
                f"activation: got {options['activation']!r}, must be {self._activation!r} or left out for "
                f"{type(self).__name__}; MGLUFeedForward takes any"
            )
        check_sizes(hidden=hidden, intermediate=intermediate)
        super().__init__()
        self.mglu = MGLU(hidden, intermediate, **options)
        device, dtype = self.mglu.weight.device, options.get("dtype")
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        self.mglu.reset_parameters()
        self.down_proj.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., hidden]` to `[..., hidden]`.

        Raises:
            TypeError, ValueError: as in `MGLU`.
        """
        return self.down_proj(self.mglu(x))


class SwiMGLU(MGLUFeedForward):
    """`MGLUFeedForward` gated by SiLU (Swish)."""

    _activation = "silu"


class GeMGLU(MGLUFeedForward):
    """`MGLUFeedForward` gated by GELU."""

    _activation = "gelu"


class ReMGLU(MGLUFeedForward):
    """`MGLUFeedForward` gated by ReLU."""

    _activation = "relu"
