"""Ragged batches written row by row, and the packed inputs they stand for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from luyen.algorithms.advantages import Credit, CreditInputs
from luyen.algorithms.layout import Layout

NAN = float("nan")
T = TypeVar("T", int, float)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence: its group, which tokens train, and its streams."""

    group: int
    mask: tuple[bool, ...]
    rewards: tuple[float, ...]
    values: tuple[float, ...] = ()
    old_logp: tuple[float, ...] = ()
    ref_logp: tuple[float, ...] = ()
    sum_pi_squared: tuple[float, ...] = ()
    is_weights: tuple[float, ...] = ()
    turns: tuple[int, ...] = ()
    baseline: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)


def row(group: int, mask: str, rewards: Sequence[float], **streams: object) -> Row:
    """A row whose mask is written as text: `x` trains, `.` does not."""
    marks = tuple(mark == "x" for mark in mask)
    return Row(group=group, mask=marks, rewards=tuple(rewards), **streams)  # type: ignore[arg-type]


def outcome_row(group: int, mask: str, reward: float, **streams: object) -> Row:
    """A row with its whole reward on the last token."""
    return row(group, mask, [0.0] * (len(mask) - 1) + [reward], **streams)


def layout_of(rows: Sequence[Row]) -> Layout:
    lengths = torch.tensor([0] + [len(r.mask) for r in rows])
    return Layout(
        mask=torch.tensor([m for r in rows for m in r.mask], dtype=torch.bool),
        offsets=lengths.cumsum(0),
        groups=torch.tensor([r.group for r in rows], dtype=torch.int64),
    )


def inputs_of(rows: Sequence[Row], dtype: torch.dtype = torch.float64) -> CreditInputs:
    """Packed inputs; streams that the rows do not carry are absent."""

    def stream(name: str) -> Tensor | None:
        if any(len(getattr(r, name)) != len(r.mask) for r in rows):
            return None
        return torch.tensor([x for r in rows for x in getattr(r, name)], dtype=dtype)

    rewards = stream("rewards")
    assert rewards is not None
    names = list(rows[0].parts) if rows else []
    turns = stream("turns")
    parts = {n: torch.tensor([r.parts[n] for r in rows], dtype=dtype) for n in names}
    return CreditInputs(
        rewards=rewards,
        layout=layout_of(rows),
        values=stream("values"),
        baselines=torch.tensor([r.baseline for r in rows], dtype=dtype),
        components=parts or None,
        old_logp=stream("old_logp"),
        ref_logp=stream("ref_logp"),
        sum_pi_squared=stream("sum_pi_squared"),
        is_weights=stream("is_weights"),
        turns=None if turns is None else turns.long(),
    )


def per_row(x: Tensor, rows: Sequence[Row]) -> list[list[float]]:
    """A packed stream cut back into rows."""
    return [part.tolist() for part in x.split([len(r.mask) for r in rows])]


def advantages(credit: Credit, rows: Sequence[Row]) -> list[list[float]]:
    return per_row(credit.advantages, rows)


QUARTERS = st.integers(-8, 8).map(lambda n: n / 4)


@st.composite
def rows_of(draw: st.DrawFn, group: int, *, live: bool = False, weighted: bool = False) -> Row:
    """A row of 1 to 6 tokens with every stream; with `live` at least one token trains."""
    mask = draw(st.lists(st.booleans(), min_size=1, max_size=6))
    if live and not any(mask):
        mask[draw(st.integers(0, len(mask) - 1))] = True
    n = len(mask)

    def stream(values: st.SearchStrategy[T]) -> tuple[T, ...]:
        return tuple(draw(st.lists(values, min_size=n, max_size=n)))

    return Row(
        group=group,
        mask=tuple(mask),
        rewards=stream(QUARTERS),
        values=stream(QUARTERS),
        old_logp=stream(st.integers(1, 12).map(lambda k: -k / 4)),
        ref_logp=stream(st.integers(1, 12).map(lambda k: -k / 4)),
        sum_pi_squared=stream(st.integers(1, 9).map(lambda k: k / 10)),
        is_weights=stream(st.integers(1, 8).map(lambda k: k / 4)) if weighted else (),
        turns=tuple(accumulate(stream(st.integers(0, 1)))),
        baseline=draw(QUARTERS),
        parts={"correct": draw(QUARTERS), "format": draw(QUARTERS)},
    )


@st.composite
def batches(draw: st.DrawFn, *, live: bool = False) -> list[Row]:
    """One to seven rows of up to three groups."""
    weighted = draw(st.booleans())
    groups = draw(st.lists(st.integers(0, 2), min_size=1, max_size=7))
    return [draw(rows_of(group, live=live, weighted=weighted)) for group in groups]
