"""Embeddings whose gradient repeats to the bit on a GPU."""

from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from luyen.models.picked import picked


def steady_embeddings(model: nn.Module) -> None:
    """Let every embedding look up each distinct token once, and spread the rows from there.

    What a class makes of its rows (a scale) stays its own. One whose forward takes more than tokens
    (OPT's positions) is left alone, and so is an adapter of an embedding.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding) and len(signature(module.forward).parameters) == 1:
            vars(module)["forward"] = MethodType(_forward, module)


def _forward(self: nn.Embedding, tokens: Tensor) -> Tensor:
    plain: Any = type(self).forward
    if not (torch.is_grad_enabled() and self.weight.requires_grad):
        return plain(self, tokens)
    distinct, place = tokens.unique(return_inverse=True)
    return picked(plain(self, distinct), place.flatten()).unflatten(0, tokens.shape)
