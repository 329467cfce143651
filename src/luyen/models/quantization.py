"""4-bit weights below an adapter (QLoRA), through bitsandbytes.

The linear layers of a model, its output layer apart, hold NF4 numbers with a scale for each block
of 64. A product first restores the weight in the type of its input, then multiplies as any other
linear layer does: generation and training compute the same numbers, and a row does not depend on
how many there are. bitsandbytes' own products choose a kernel by the number of rows.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from luyen.base.errors import UserError
from luyen.config.schema.model import ModelConfig
from luyen.models.batch_invariant_linear import RESTORED, ProductShape, product_of

_FIELD = "actor_rollout_ref.model.quantization"
_KIND = "nf4"
BLOCK = 64
"""Numbers that share a scale."""


@functools.cache
def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError:
        why, fix = "bitsandbytes is not installed", "pip install 'luyen[quant]'"
        raise UserError(_FIELD, _KIND, why, fix) from None
    return bitsandbytes


class _Product(torch.autograd.Function):
    """`x @ weight.T + bias`; the backward pass restores the weight again, none is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        return product_of(layer)(x, restored(layer).to(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ restored(ctx.layer).to(ctx.dtype), None


@functools.cache
def _layer_class() -> Any:
    """bitsandbytes' layer, so that peft knows what to put an adapter on, with our product."""
    base = _bitsandbytes().nn.Linear4bit

    class QuantizedLinear(base):
        """A linear layer whose weight is 4-bit numbers and their scales."""

        def forward(self, x: Tensor) -> Tensor:
            return _Product.apply(x, self)

    return QuantizedLinear


def quantize(net: PreTrainedModel, model: ModelConfig, device: torch.device) -> None:
    """Replace the weights of linear layers by 4-bit numbers on the device, one layer at a time."""
    output = net.get_output_embeddings()
    layers = {
        name: layer
        for name, layer in net.named_modules()
        if type(layer) is nn.Linear and layer is not output
    }
    if not layers:
        why = f"{type(net).__name__} has no linear layers that bitsandbytes knows"
        raise UserError(_FIELD, _KIND, why, "set it to none, or take another model")
    for name, layer in layers.items():
        parent, _, own = name.rpartition(".")
        setattr(net.get_submodule(parent), own, _quantized(layer, model, device))


@torch.no_grad()
def _quantized(layer: nn.Linear, model: ModelConfig, device: torch.device) -> nn.Module:
    bnb = _bitsandbytes()
    numbers, state = bnb.functional.quantize_4bit(
        layer.weight.to(device).contiguous(),
        blocksize=BLOCK,
        compress_statistics=model.double_quantization,
        quant_type=_KIND,
    )
    made = _layer_class()(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=layer.weight.dtype,
        compress_statistics=model.double_quantization,
        quant_type=_KIND,
        device="meta",
    )
    made.weight = bnb.nn.Params4bit(
        numbers,
        requires_grad=False,
        quant_state=state,
        blocksize=BLOCK,
        compress_statistics=model.double_quantization,
        quant_type=_KIND,
        bnb_quantized=True,
        module=made,
    )
    vars(made)[RESTORED] = ProductShape.of(layer.weight, layer.bias)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.detach().to(device), requires_grad=False)
    return made


def restored(layer: Any) -> Tensor:
    """The weight of a quantised layer as numbers of the type that it was loaded in."""
    weight = layer.weight
    return _bitsandbytes().functional.dequantize_4bit(weight, weight.quant_state)


def is_quantized(layer: nn.Module) -> bool:
    """Whether a layer holds 4-bit numbers."""
    return RESTORED in vars(layer)


def plain_state(net: PreTrainedModel) -> dict[str, Tensor]:
    """`state_dict` with the weights of quantised layers restored, and nothing of their scales."""
    quantized = {name: layer for name, layer in net.named_modules() if is_quantized(layer)}
    if not quantized:
        return net.state_dict()
    found: dict[str, Tensor] = {}
    for name, tensor in net.state_dict().items():
        owner, _, key = name.partition(".weight")
        if owner not in quantized:
            found[name] = tensor
        elif not key:
            found[name] = restored(quantized[owner])
    return found
