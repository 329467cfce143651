"""Attention that turns queries and keys itself."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from luyen.models.fused.rotary import Joint
from luyen.models.kernels import Window


@runtime_checkable
class JointAttention(Protocol):
    """An attention context that would rather have queries and keys before they are turned."""

    def attend_joint(self, layer: int, joint: Joint, scale: float, window: Window) -> Tensor:
        """`[1, tok, heads, width]`, as `attend` gives it for the turned heads."""
        ...
