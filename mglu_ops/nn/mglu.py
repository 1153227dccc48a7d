"""The MGLU projection on the fused operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import ops
from .arguments import as_parameter, check_flags, check_options, check_router, check_weight_and_masks
from .masked_linear import MaskedLinear, MaskedOptions
from .packed_buffers import check_masks_in_use
from .torchao_weights import is_of_torchao, unpacked

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class MGLU(MaskedLinear):
    """The gated projection of a Masked Gated Linear Unit (arXiv 2506.23225, eq. 3), without bias.

        y = sum_i r_i(x) * act(x (M_i * W)^T) * (x ((1 - M_i) * W)^T),   i = 1 .. n_masks

    Learnable masks are `M = mask_logits > 0` with the straight-through gradient. Fixed masks are packed, one bit per
    weight and mask (`mglu_ops.masks`). `mglu_ops.freeze` turns learnable masks into fixed ones. With `top_k`, each
    token keeps the masks of its `top_k` largest router logits, `r = softmax(top_k(x R^T))`; r_i is 0 for the other
    masks. Without `top_k`, every r_i is 1.

    The `state_dict` holds `weight`, either `mask_logits` or `packed_masks`, and `router.weight` if there is a router,
    as for `NaiveMGLU`. `load_state_dict` refuses packed masks of the wrong dtype, shape or padding, also with
    `strict=False` or `assign=True`. After other loaders, the layer refuses such masks at its first use, and
    `mglu_ops.nn.check_masks` refuses them earlier. Other wrong bits cannot be detected
    (`mglu_ops.check_packed_masks`).

    The weight of a layer with fixed masks may be stored in 8 or 4 bits. Its scales are then in `weight_scale`, also in
    the `state_dict`. `to(dtype)`, `half()` and similar methods cast neither weight nor scales. `load_state_dict`
    refuses both if a dtype or a shape does not fit `weight_format`, or if one of the two is missing. Other loaders,
    such as accelerate's and `torch.distributed.checkpoint`, cast tensors to the dtypes of the model, and skip those
    that it lacks. After them, a call refuses a weight whose scales were not replaced, but nothing else can be detected:
    load into a model that has the forms of masks and the formats of the checkpoint.

    Args:
        in_features: last size of x, at least 1.
        out_features: last size of the result, at least 1.
        n_masks: number of masks, 1 to 16.
        activation: `silu`, `gelu`, `gelu_tanh`, `relu`, `sigmoid`, `tanh`, `identity` or `relu_squared`.
        learnable_masks: learn the masks; if False, they are random, fixed and packed.
        top_k: number of masks that a token keeps, 1 to n_masks; None for no router.
        weight_init: `paper` draws the weight as `nn.Linear` does (Algorithm 2). `leveled` multiplies it by
            `(20 / (n_masks^2 + n_masks))^(1/4)`, so that the sum over the masks starts as large as with four masks. We
            recommend `leveled` for any number of masks but four (mglu_ops/nn/README.md). With a router, the factor is
            `(20 / (1 + 1 / top_k))^(1/4)`. With `sigmoid` the exponent is 1/2, and with `relu_squared` it is 1/6.
        weight_format: `dense` for the dtype of x, or `fp8_row`, `fp8_block`, `int8_row` or `int4_group` for 8 or 4 bits
            (`mglu_ops.formats`), which need `learnable_masks=False`. A quantized layer takes x in float16, bfloat16 or
            float32, and computes the gradient of x but none of the weight. Use this argument to make a layer into which
            a checkpoint is loaded; `mglu_ops.quantize` quantizes a frozen layer.
        activation_format: `dense` to multiply x itself. `fp8_token`, with weights in `fp8_row` or `fp8_block`, rounds
            x to fp8 with one scale per token at each call, for inference only (`mglu_ops.quantize`). It is not in the
            `state_dict`. The attribute of this name may be changed at any time.
        save_activations: keep n_masks + 1 tensors of the result's size and dtype (2 n_masks + 1 with a router) for the
            backward pass. If False, only x is kept, and the backward pass computes the forward pass again, which adds
            n_masks + 1 matrix products to the 3 (n_masks + 1) of a training step. The gradients are the same bit for
            bit. If the weight or the masks were written to meanwhile, autograd raises an error. The router is not
            recomputed. In the gradient transforms of `torch.func`, activations are kept. The attribute of this name may
            be changed at any time.
        device: device of parameters and buffers; on `meta`, call `to_empty` and `reset_parameters` before use.
        dtype: dtype of a dense weight, mask_logits and router: float16, bfloat16, float32 or float64.

    Attributes:
        weight: Parameter `[out_features, in_features]`, initialised as `weight_init` says. Unless it is dense, its
            dtype and shape are the format's, and `requires_grad` is False.
        weight_scale: Parameter of the scales, with `requires_grad=False`; None if the weight is dense.
        mask_logits: Parameter `[n_masks, out_features, in_features]`, drawn from 0.01 * N(0, 1); None if the masks are
            fixed.
        packed_masks: buffer `uint8 [out_features, ceil(in_features / 8), n_masks]`; None if the masks are learnable.
        router: `nn.Linear(in_features, n_masks, bias=False)`; None without `top_k`.

    Raises:
        TypeError: an option is not an argument of `MGLU`.
        ValueError: an argument is out of range or of another type.
    """

    _leading_names: ClassVar[tuple[str, ...]] = ()  # names of the sizes in `leading`
    save_activations: bool = True  # used if `freeze` has turned a NaiveMGLU into an MGLU, since __init__ did not run

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        save_activations: bool = True,
        **options: Unpack[MaskedOptions],
    ) -> None:
        check_options(self, options, MaskedOptions)
        check_flags(save_activations=save_activations)
        super().__init__(in_features, out_features, **options)
        self.save_activations = save_activations

    @classmethod
    def from_parameters(
        cls,
        weight: Tensor,
        masks: Tensor,
        *,
        activation: str = "silu",
        router: nn.Linear | None = None,
        top_k: int | None = None,
        save_activations: bool = True,
    ) -> Self:
        """Make a layer from existing tensors, such as the parameters of your own module.

        Parameters are used without a copy, so that tied weights stay tied. Any other tensor becomes a Parameter that
        shares its memory.

        Args:
            weight: `[out_features, in_features]`, float16, bfloat16, float32 or float64.
            masks: `[n_masks, out_features, in_features]`, or `[out_features, in_features]` for one mask. Floating
                values are logits with `M = logits > 0`, which can be trained; subtract a threshold other than 0 first.
                Bool masks are fixed, and are packed.
            activation: as in `MGLU`; it applies to the product with the weights whose mask is 1.
            router: `nn.Linear(in_features, n_masks)` with or without bias, for `top_k`.
            top_k: as in `MGLU`.
            save_activations: as in `MGLU`.

        Raises:
            TypeError: a tensor has another dtype, or `router` is not a module.
            ValueError: a tensor or `router` has the wrong shape, only one of `top_k` and `router` is given, or another
                argument is out of range.
        """
        check_weight_and_masks(weight, masks, cls._leading_names)
        if (router is None) != (top_k is None):
            raise ValueError(f"router: got {router!r} with top_k={top_k!r}, must both be given or both be None")
        masks = masks.unsqueeze(0) if masks.dim() == 2 else masks
        *experts, out_features, in_features = weight.shape
        n_masks = masks.shape[-3]
        if router is not None:
            check_router(router, in_features, n_masks)
        layer = cls(  # type: ignore[misc] # MGLUExperts takes num_experts first
            *experts,
            in_features,  # type: ignore[arg-type]
            out_features,
            n_masks=n_masks,
            activation=activation,
            learnable_masks=masks.is_floating_point(),
            top_k=top_k,
            save_activations=save_activations,
            device="meta",
            dtype=weight.dtype,
        )
        layer.weight = as_parameter(weight)
        layer.router = router
        if masks.is_floating_point():
            layer.mask_logits = as_parameter(masks)
        else:
            layer.packed_masks = torch.stack([*map(ops.pack_masks, masks)]) if experts else ops.pack_masks(masks)
        return layer

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter. A weight that torchao has quantized is converted to one of this package's formats."""
        if name == "weight" and is_of_torchao(param):
            if self.learnable_masks:
                raise ValueError(
                    "weight: got a quantized weight of torchao, but the masks are learned, must be frozen before: call "
                    "mglu_ops.freeze(model) first"
                )
            stored, weight, scale = unpacked(param)
            self.weight_format, self.weight_scale = stored.name, nn.Parameter(scale, requires_grad=False)
            param = nn.Parameter(weight, requires_grad=False)
        super().register_parameter(name, param)

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., in_features]` to `[..., out_features]`. Under autocast, the result has autocast's dtype.

        Masks, weight and scales are checked too, since loaders other than `load_state_dict` do not check them.

        Raises:
            TypeError: x is not a dense tensor, or without autocast its dtype differs from a dense weight's; or the
                dtype of the weight or the scales does not fit `weight_format`.
            ValueError: x is not on the weight's device, or its last size is not in_features; packed masks, weight or
                scales have the wrong shape, or the padding of the masks is not 0; a quantized weight requires a
                gradient, or is computed by an adapter; or x requires a gradient and the layer has an
                `activation_format` other than `dense`.
        """
        if isinstance(x, torch.fx.Proxy):  # a Proxy of torch.fx.symbolic_trace has no values
            return self._project(x, self.mask_weights(x), *self._tensors())
        self.check_input(x)
        if self.packed_masks is not None:
            check_masks_in_use(self, self.packed_masks)
        return self._run(self._project, x, self.mask_weights(x), *self._tensors())

    def _run(self, function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        """Call a function of tensors. Unless activations are saved, backward calls it again.

        Backward recomputes from the tensors that are passed here, whatever the module holds then. The operators draw no
        random numbers, so the generator's state need not be kept.
        """
        if self.save_activations or not torch.is_grad_enabled() or _are_hooks_disabled():
            return function(*tensors)
        result: Tensor = checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
        return result

    def _tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        return self.weight, self.mask_logits, self.packed_masks, self.weight_scale

    def _project(
        self,
        x: Tensor,
        mask_weights: Tensor | None,
        weight: Tensor,
        mask_logits: Tensor | None,
        packed_masks: Tensor | None,
        scale: Tensor | None,
    ) -> Tensor:
        if packed_masks is None:
            return ops.forward_ste(x, weight, mask_logits, self.activation, mask_weights)[0]
        given = (x, weight, packed_masks, self.activation, mask_weights)
        if self.weight_format == "dense":
            return ops.forward(*given)
        return ops.forward(*given, scale, self.weight_format, self.activation_format)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, save_activations={self.save_activations}"


def _are_hooks_disabled() -> bool:
    """True in the gradient transforms of `torch.func`, which do not allow the hooks that a checkpoint needs."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None
