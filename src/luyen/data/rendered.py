"""Conversations as tokens, with the origin of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from luyen.base.records import Source


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A conversation, or a branch of one, as tokens.

    Example:
        >>> Rendered(tokens=(5, 6), sources=(Source.PROMPT, Source.SAMPLED), turns=(0, 0)).sampled
        (6,)
    """

    tokens: tuple[int, ...]
    """Ids, in order."""
    sources: tuple[Source, ...]
    """Where each came from."""
    turns: tuple[int, ...]
    """Assistant turn that each belongs to; what leads to a turn belongs to it."""
    breaks: tuple[str, ...] = ()
    """What kept the branch from being one growing token list, if anything did."""

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.sources) == len(self.turns), "streams differ in length"

    @property
    def sampled(self) -> tuple[int, ...]:
        """The tokens that the assistant wrote."""
        pairs = zip(self.tokens, self.sources, strict=True)
        return tuple(token for token, source in pairs if source == Source.SAMPLED)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """What follows the tokens that are there, up to the assistant's next turn.

    Example:
        >>> Extension(tokens=(7,), sources=(Source.TOOL,), restart=None).restart is None
        True
    """

    tokens: tuple[int, ...]
    """Tokens to append; after a restart the whole prompt of the new branch."""
    sources: tuple[Source, ...]
    """Where each came from."""
    restart: str | None
    """Why the conversation cannot simply grow and a new branch must begin; None when it can."""
    notes: tuple[str, ...] = ()
    """What had to be changed in the messages' text, if anything had to be."""


@final
class Stream:
    """A branch while it grows."""

    def __init__(self, *breaks: str) -> None:
        self.tokens: list[int] = []
        self.sources: list[Source] = []
        self.turns: list[int] = []
        self.breaks: list[str] = [*breaks]

    def add(self, ids: Sequence[int], source: Source, turn: int) -> None:
        """Append tokens of one origin."""
        self.add_each(ids, [source] * len(ids), turn)

    def add_each(self, ids: Sequence[int], sources: Sequence[Source], turn: int) -> None:
        """Append tokens with the origin of each."""
        self.tokens += ids
        self.sources += sources
        self.turns += [turn] * len(ids)

    def close(self) -> Rendered:
        """The branch as it stands."""
        return Rendered(
            tokens=tuple(self.tokens),
            sources=tuple(self.sources),
            turns=tuple(self.turns),
            breaks=tuple(self.breaks),
        )
