"""The turns of a recorded rollout, each as it stood when the policy was asked."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from luyen.base.records import Rollout, Source


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """A stretch of sampled tokens, and what stood before it.

    Example:
        >>> turn = RecordedTurn(branch=0, turn=1, before=(1, 2), tokens=(3,), logps=(-0.5,), room=8)
        >>> len(turn.before)
        2
    """

    branch: int
    """Which token list of the rollout."""
    turn: int
    """The assistant's turn."""
    before: tuple[int, ...]
    """Everything that the policy had read."""
    tokens: tuple[int, ...]
    """What it drew."""
    logps: tuple[float, ...]
    """Their log-probabilities."""
    room: int
    """Most tokens that it could have drawn."""


def turns_of(rollout: Rollout, *, max_response_length: int) -> Iterator[RecordedTurn]:
    """The turns in order; a turn without a sampled token is none."""
    opening, sampled = rollout.prompt_length, 0
    for number, branch in enumerate(rollout.branches):
        own = [i for i, source in enumerate(branch.sources) if source == Source.SAMPLED]
        for turn in dict.fromkeys(branch.turns[i] for i in own):
            places = [i for i in own if branch.turns[i] == turn]
            begin, end = places[0], places[-1] + 1
            logps = branch.logps[begin:end]
            room = min(opening + max_response_length - begin, max_response_length - sampled)
            sampled += len(places)
            yield RecordedTurn(
                branch=number,
                turn=turn,
                before=branch.tokens[:begin],
                tokens=branch.tokens[begin:end],
                logps=tuple(logp for logp in logps if logp is not None),
                room=room,
            )
