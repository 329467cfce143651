"""A few rollouts of a step as a table of texts and numbers, for loggers that show tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from luyen.base.records import Rollout, Source

TRAIN_TABLE, VAL_TABLE = "rollouts/train", "rollouts/validation"
Cell: TypeAlias = str | int | float | None
COLUMNS = ("step", "prompt", "response", "reward", "stop", "fault", "sample", "tokens")
"""Columns of every table; `tokens` counts those of the response."""
_LONGEST = 10_000
"""Characters of a prompt or a response in a table; rollout files hold all of them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTable:
    """Rollouts of a step, chosen evenly over all of them.

    Example:
        >>> table = RolloutTable(name="rollouts/train", step=3, rows=((3, "1+1=", "2|", 1.0,
        ...                      "answered", None, 0, 2),))
        >>> print(table.markdown())
        | step | prompt | response | reward | stop | fault | sample | tokens |
        |---|---|---|---|---|---|---|---|
        | 3 | 1+1= | 2\\| | 1.0 | answered |  | 0 | 2 |
    """

    name: str
    """`rollouts/train` or `rollouts/validation`."""
    step: int
    """The step after which they are shown."""
    rows: tuple[tuple[Cell, ...], ...]
    """Cells in the order of `COLUMNS`."""

    def columns(self) -> dict[str, list[Cell]]:
        """Column -> its cells."""
        return {name: [row[i] for row in self.rows] for i, name in enumerate(COLUMNS)}

    def markdown(self) -> str:
        """The table as Markdown, one line a row."""
        lines = [COLUMNS, ("---",) * len(COLUMNS), *self.rows]
        first, rule, *rest = ["|".join(("", *map(_escaped, line), "")) for line in lines]
        return "\n".join([first, rule.replace(" ", ""), *rest])


def _escaped(cell: Cell) -> str:
    said = "" if cell is None else str(cell)
    return f" {said.replace('|', chr(92) + '|').replace(chr(10), '<br>')} "


def rollout_table(
    name: str,
    step: int,
    rollouts: Sequence[Rollout],
    *,
    most: int,
    decode: Callable[[Sequence[int]], str],
) -> RolloutTable | None:
    """At most `most` of the rollouts; None where there is nothing to show.

    The choice depends on their addresses alone, so every validation shows the same prompts.
    """
    ordered = sorted(rollouts, key=lambda rollout: rollout.key)
    count = min(most, len(ordered))
    if not count:
        return None
    chosen = [ordered[i * len(ordered) // count] for i in range(count)]
    return RolloutTable(name=name, step=step, rows=tuple(_row(step, r, decode) for r in chosen))


def _row(step: int, rollout: Rollout, decode: Callable[[Sequence[int]], str]) -> tuple[Cell, ...]:
    first = rollout.branches[0]
    places = (i for i, source in enumerate(first.sources) if source is not Source.PROMPT)
    prompt = decode(first.tokens[: next(places, len(first.tokens))])
    said = "\n".join(map(_spoken, rollout.messages)) if rollout.messages else rollout.text
    reward = None if rollout.score is None else rollout.score.value
    return (
        *(step, _cut(prompt), _cut(said), reward, rollout.stop.value, rollout.fault),
        *(rollout.sample, rollout.response_length),
    )


def _spoken(message: Any) -> str:
    """A message with its role; calls of tools are shown as they are stored."""
    said = [str(message.get("content") or ""), *map(str, message.get("tool_calls") or ())]
    return f"{message['role']}: {' '.join(part for part in said if part)}"


def _cut(said: str) -> str:
    """The text; of a long one the beginning, with the number of characters that are left out."""
    # A lone half of a surrogate pair is no text in any of the stores.
    whole = said.encode(errors="replace").decode()
    left = len(whole) - _LONGEST
    return whole if left <= 0 else f"{whole[:_LONGEST]} ... ({left} more characters)"
