"""Linear layers on an ARM CPU: a row that is multiplied alone has the bits it has among others.

OpenBLAS sums the products of a row in one order, however many rows there are, but for a single one,
which it takes for a vector and sums in another. So a single row is multiplied twice.
"""

from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from luyen.base.exactness import has_mkl, is_promised
from luyen.models.steady_linear import PRODUCT


def steady_single_rows(model: nn.Module) -> None:
    """Make every plain linear layer steady, in place, where this processor needs it.

    Only plain layers are seen, the base and the adapter of a LoRA layer among them; experts that
    multiply by themselves are not. Two libraries would sum differently, so one is shut.
    """
    is_single = all(parameter.dtype == torch.float32 for parameter in model.parameters())
    if has_mkl() or not is_single or not is_promised("float32"):
        return
    torch.backends.mkldnn.enabled = False  # pyright: ignore[reportAttributeAccessIssue]
    for module in model.modules():
        if type(module) is nn.Linear:
            vars(module).update({PRODUCT: twice_if_single, "forward": MethodType(_forward, module)})


def twice_if_single(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`; the bits of a row do not depend on whether it is alone.

    Example:
        >>> twice_if_single(torch.ones(1, 2), torch.ones(3, 2))
        tensor([[2., 2., 2.]])
    """
    if x.numel() != x.shape[-1]:
        return F.linear(x, weight, bias)
    both = F.linear(x.reshape(1, -1).repeat(2, 1), weight, bias)
    return both[0].view(*x.shape[:-1], -1)


def _forward(self: nn.Linear, x: Tensor) -> Tensor:
    return twice_if_single(x, self.weight, self.bias)
