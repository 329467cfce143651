"""What is wrong with rows, for people and for programs: equal complaints stand together."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from luyen.base.errors import UserError
from luyen.base.files import plain
from luyen.data.formats.raw import place
from luyen.data.formats.read import Problem

_MOST = 8
"""Row numbers, and kinds of problems, that are listed before the rest is counted."""


def problem_lines(
    problems: Sequence[Problem], torn: UserError | None, address: str
) -> Iterator[Text]:
    """A line per kind of problem with the rows that have it, and below it the first of them."""
    if torn is not None:
        yield Text(f"The file breaks off: {torn.why}. Fix: {torn.fix}", style="red")
    if not problems:
        return
    rows = {(problem.at.file, problem.at.number) for problem in problems}
    yield Text(f"Problems in {counted(len(rows), 'row')}", style="bold red")
    groups = grouped(problems)
    for (column, why), some in list(groups.items())[:_MOST]:
        first = some[0]
        places = [place(problem.at, address) for problem in some[:_MOST]]
        is_one_file = all(problem.at.file == address for problem in some)
        if is_one_file and len(some) > 1:
            places = [f"rows {', '.join(str(problem.at.number) for problem in some[:_MOST])}"]
        more = f" and {len(some) - _MOST:,} more" if len(some) > _MOST else ""
        yield Text(f"  {column}: {why}", style="red")
        yield Text(f"    {', '.join(places)}{more}")
        yield Text(f"    {first.column} = {first.error.value!r}", style="bright_black")
        yield Text(f"    Fix: {first.error.fix}")
    if len(groups) > _MOST:
        yield Text(f"  ... and {len(groups) - _MOST} more kinds of problems (--json lists all)")


def grouped(problems: Sequence[Problem]) -> dict[tuple[str, str], list[Problem]]:
    """Problems by column and reason; the places inside a list count as one column."""
    found: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        column = re.sub(r"\[\d+\]", "[]", problem.column)
        found.setdefault((column, problem.error.why), []).append(problem)
    return found


def problems_json(problems: Sequence[Problem], torn: UserError | None) -> list[dict[str, Any]]:
    """Every problem as plain data; a file that breaks off is one without a row."""
    rows = [(p.at.file, p.at.number, p.column, p.error) for p in problems]
    whole = [(str(torn.value), None, torn.field, torn)] if torn is not None else []
    return [
        {
            "file": file,
            "row": number,
            "column": column,
            "value": plain(error.value),
            "reason": error.why,
            "fix": error.fix,
        }
        for file, number, column, error in [*rows, *whole]
    ]


def counted(count: int, noun: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "row"), counted(1200, "row")
        ('1 row', '1,200 rows')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
