"""Conversations written as text: one mark a token, and what they scored."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from luyen.base.records import Branch, GroupId, Rollout, Score, Source, StopReason, make_prompt
from luyen.rollout.single_turn import Group

PROMPT = make_prompt([{"role": "user", "content": "?"}])


def branch(marks: str, *, first: int = 0, history: int = 0) -> Branch:
    """`p` prompt, `t` tool, and a digit for a token sampled in that turn.

    `first` is added to every token that was not sampled in this branch, `history` counts tokens
    drawn before, so that sampled tokens are numbered through all branches.
    """
    sources, turns, logps, tokens = list[Source](), list[int](), list[float | None](), list[int]()
    turn = 0
    for place, mark in enumerate(marks):
        is_drawn = mark.isdigit()
        turn = int(mark) if is_drawn else turn
        history += is_drawn
        sources.append(Source.SAMPLED if is_drawn else Source("pt".index(mark) * 2))
        turns.append(turn)
        logps.append(-0.125 * history if is_drawn else None)
        tokens.append(30 + history if is_drawn else 3 + (first + place) % 20)
    return Branch(
        tokens=tuple(tokens),
        sources=tuple(sources),
        turns=tuple(turns),
        logps=tuple(logps),
        versions=tuple(None if logp is None else 0 for logp in logps),
    )


def talk(
    *marks: str,
    score: Score | float = 0.0,
    draw: int = 0,
    sample: int = 0,
    **more: Any,
) -> Rollout:
    """A judged rollout; several texts are its branches."""
    drawn, made = 0, list[Branch]()
    for text in marks:
        made.append(branch(text, first=drawn, history=drawn))
        drawn += sum(mark.isdigit() for mark in text)
    last = made[-1]
    return Rollout(
        group=GroupId(step=0, draw=draw, uid="u"),
        sample=sample,
        tokens=last.tokens,
        sources=last.sources,
        turns=last.turns,
        logps=last.logps,
        versions=last.versions,
        stop=StopReason.ANSWERED,
        text="",
        score=score if isinstance(score, Score) else Score(name="reward", value=score),
        earlier=tuple(made[:-1]),
        **more,
    )


def groups(*rollouts: Rollout) -> list[Group]:
    """Rollouts of one draw as a group, numbered in order."""
    draws = dict.fromkeys(r.group for r in rollouts)
    return [
        Group(prompt=PROMPT, rollouts=tuple(_numbered([r for r in rollouts if r.group == draw])))
        for draw in draws
    ]


def _numbered(rollouts: Sequence[Rollout]) -> list[Rollout]:
    return [replace(rollout, sample=i) for i, rollout in enumerate(rollouts)]


@st.composite
def marks(draw: st.DrawFn, *, first_turn: int = 0, most: int = 4) -> str:
    """A prompt, then turns of sampled tokens, some empty, with tool results between them."""
    lengths = draw(st.lists(st.integers(0, 3), min_size=1, max_size=most))
    text = "p" * draw(st.integers(1, 3))
    for turn, length in enumerate(lengths, first_turn):
        text += str(turn) * length + "t" * draw(st.integers(0, 2))
    return text


NUMBERS = st.floats(-8, 8, allow_nan=False).map(lambda x: round(x, 3))


@st.composite
def leaves(draw: st.DrawFn) -> Score:
    """A score with shares of turns, which need not add up to its value."""
    shares = draw(st.lists(st.tuples(st.integers(0, 5), NUMBERS), max_size=4))
    weight, value = draw(NUMBERS), draw(NUMBERS)
    return Score(name="leaf", value=value, weight=weight, by_turn=tuple(shares))


def _summed(parts: list[Score], weight: float) -> Score:
    value = sum(part.weight * (part.value or 0.0) for part in parts)
    return Score(name="sum", value=value, weight=weight, parts=tuple(parts))


TREES = st.recursive(
    leaves(),
    lambda inner: st.builds(_summed, st.lists(inner, min_size=1, max_size=3), NUMBERS),
    max_leaves=6,
)
"""Trees whose inner scores are the weighted sums of their parts."""
