"""Forward passes of our own functions without the bookkeeping of gradients."""

from typing import Any, final

import torch
from torch import Tensor


def applied(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """`function.apply`; where nobody wants gradients, its forward alone.

    Reading a prompt is a thousand small calls, and the host is slower than the device at them.
    """
    if torch.is_grad_enabled():
        return function.apply(*inputs)
    return function.forward(_Forgetful(), *inputs)


@final
class _Forgetful:
    """The context of a function that will not be called backward: it takes all and keeps none."""

    def save_for_backward(self, *_: Tensor | None) -> None:
        """Nothing to save for."""

    def set_materialize_grads(self, _: bool) -> None:
        """There will be none."""
