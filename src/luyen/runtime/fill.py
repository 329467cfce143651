"""Weights written into the parameters of an engine, which keep their addresses."""

from collections.abc import Mapping

import torch
from torch import Tensor

from luyen.base.errors import UserError

_FIELD = "actor_rollout_ref.rollout.name"
_FIX = "publish the parameters of the very model that the engine holds"


def fill(own: Mapping[str, Tensor | str], given: Mapping[str, Tensor]) -> None:
    """Write values into the parameters of an engine; they keep their addresses.

    A UserError for a parameter that the engine has not, or has in another form.
    """
    with torch.no_grad():
        for name, tensor in given.items():
            mine = own.get(name)
            if mine is None:
                raise UserError(_FIELD, name, "the engine has no such parameter that learns", _FIX)
            if isinstance(mine, str):
                why = "the engine holds its weights elsewhere and takes none from here"
                raise UserError(_FIELD, name, why, "use an engine that shows its parameters")
            if (mine.dtype, mine.shape) != (tensor.dtype, tensor.shape):
                why = f"it is {_form(mine)} in the engine and came as {_form(tensor)}"
                raise UserError(_FIELD, name, why, _FIX)
            mine.copy_(tensor)


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
