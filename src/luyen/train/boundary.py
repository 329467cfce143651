"""The last moment at which a run could be saved as it was: when the step in progress began."""

from collections.abc import Sequence
from typing import Any, final

from luyen.train.asked import Asked
from luyen.train.state import LoopState


@final
class Boundary:
    """The loop as the step began, as long as the weights are still of that moment."""

    def __init__(self) -> None:
        self.state: LoopState | None = None
        """None: the weights are being changed, or no step has begun."""
        self.asked: tuple[Asked, ...] = ()
        """What was asked for and not taken then."""

    def mark(self, state: LoopState, asked: tuple[Asked, ...]) -> None:
        """A step begins."""
        self.state, self.asked = state, asked

    def leave(self) -> None:
        """The weights change from now on."""
        self.state = None

    def refusal(self, *, saved: int) -> str | None:
        """Why a run that hangs cannot be saved as it was; None: it can, without any wait."""
        if self.state is None:
            return "the weights are being changed, so that the newest checkpoint stays"
        if self.state.step == saved:
            return f"nothing is to be saved after step {saved}"
        if any(one.needs_other_weights(self.state.version) for one in self.asked):
            return "rollouts of later steps are in progress, so that the newest checkpoint stays"
        return None


def soon_kept(asked: Sequence[Asked], version: int) -> list[dict[str, Any]]:
    """What a checkpoint of these weights keeps of rollouts that were asked for.

    Only those are waited for that other weights draw; the others will be drawn again.
    """
    return [one.as_json() if one.needs_other_weights(version) else one.as_it_is() for one in asked]
