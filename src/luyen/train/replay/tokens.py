"""Tokens of a step under two settings: what changed for each, and where it changed most."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor

from luyen.base.records import Rollout
from luyen.data.tokenizer import Tokenizer
from luyen.train.replay.learner import Trace
from luyen.train.replay.rebuild import Learned

Streams: TypeAlias = dict[str, Tensor]
"""Numbers of every token of the step by name."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """What an objective made of one token.

    Example:
        >>> TokenView(loss=2.0, weight=0.5, ratio=1.0, advantage=-2.0, gradient=1.0,
        ...           is_clipped=False).share
        1.0
    """

    loss: float
    """Its loss, terms of entropy and KL included."""
    weight: float
    """Its weight in the loss of its optimizer step."""
    ratio: float
    """Its probability by that under the weights that the update started from."""
    advantage: float
    """Its advantage."""
    gradient: float
    """Derivative of the step's loss by its log-probability, weight included."""
    is_clipped: bool
    """Whether the policy loss gives it no gradient in spite of its advantage."""

    @property
    def share(self) -> float:
        """What it adds to the loss of its optimizer step."""
        return self.loss * self.weight


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChange:
    """One token at one visit, under two settings.

    Example:
        >>> one = TokenView(loss=1.0, weight=1.0, ratio=1.0, advantage=-1.0, gradient=1.0,
        ...                 is_clipped=False)
        >>> TokenChange(rollout="1.0.ab/0", branch=0, position=7, visit=0, id=5, text=" x",
        ...             before=one, after=one).moved
        0.0
    """

    rollout: str
    """Group and sample."""
    branch: int
    """Which of its token lists."""
    position: int
    """Place in the list."""
    visit: int
    """How often the step had come to it before: its epoch."""
    id: int
    """The token."""
    text: str
    """The token as text."""
    before: TokenView
    """As the run had it."""
    after: TokenView
    """With the change."""

    @property
    def moved(self) -> float:
        """How far what it adds to the loss has moved."""
        return abs(self.after.share - self.before.share)


def token_changes(
    rollouts: Sequence[Rollout],
    tokenizer: Tokenizer,
    one: tuple[Learned, Sequence[Trace]],
    other: tuple[Learned, Sequence[Trace]],
) -> list[TokenChange]:
    """Every token that both visited, the one that moved most first.

    `rollouts` are those of the batch, in its order. Where the changed setting visits tokens more
    or less often, the visits that both have are compared.
    """
    ones, others = (_visits(learned, traces) for learned, traces in (one, other))
    places = _places(rollouts)
    found: list[TokenChange] = []
    for visit, (before, after) in enumerate(zip(ones, others, strict=False)):
        seen = (before["seen"] & after["seen"]).nonzero().flatten().tolist()
        before, after = (_listed(streams) for streams in (before, after))
        for place in seen:
            rollout, branch, position, token = places[place]
            found.append(
                TokenChange(
                    rollout=rollout,
                    branch=branch,
                    position=position,
                    visit=visit,
                    id=token,
                    text=tokenizer.decode([token], skip_special=False),
                    before=_view(before, place),
                    after=_view(after, place),
                )
            )
    return sorted(found, key=lambda change: -change.moved)


def _visits(learned: Learned, traces: Sequence[Trace]) -> list[Streams]:
    """Streams over the whole batch for each time that the step came to its tokens."""
    batch = learned.batch
    mask = batch.layout.mask
    counts = torch.zeros(mask.shape, dtype=torch.int64, device=mask.device)
    found: list[Streams] = []
    for trace in traces:
        place, explained = trace.place, trace.explained
        visit = int(counts[place[0]])
        counts[place] += 1
        if visit == len(found):
            blank = torch.zeros(mask.shape, device=mask.device)
            names = ("loss", "weight", "ratio", "gradient", "is_clipped", "seen")
            found.append({name: blank.clone() for name in names})
            found[visit]["advantage"] = batch.streams["advantages"]
        streams = found[visit]
        for name in ("loss", "weight", "ratio", "gradient", "is_clipped"):
            values: Tensor = getattr(explained, name)
            streams[name][place] = values.to(streams[name].dtype)
        streams["seen"][place] = mask[place].to(streams["seen"].dtype)
    return [{**streams, "seen": streams["seen"].bool()} for streams in found]


def _listed(streams: Streams) -> dict[str, list[float]]:
    return {name: stream.tolist() for name, stream in streams.items()}


def _places(rollouts: Sequence[Rollout]) -> list[tuple[str, int, int, int]]:
    """Rollout, branch, position and token of each place of the packed batch."""
    return [
        (f"{rollout.group}/{rollout.sample}", number, position, token)
        for rollout in rollouts
        for number, branch in enumerate(rollout.branches)
        for position, token in enumerate(branch.tokens)
    ]


def _view(streams: dict[str, list[float]], place: int) -> TokenView:
    return TokenView(
        loss=streams["loss"][place],
        weight=streams["weight"][place],
        ratio=streams["ratio"][place],
        advantage=streams["advantage"][place],
        gradient=streams["gradient"][place],
        is_clipped=bool(streams["is_clipped"][place]),
    )
