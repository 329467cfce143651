"""The time of some steps, and the spans that lie in it."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from luyen.base.errors import UserError
from luyen.studio.timeline.intervals import Interval, union
from luyen.studio.timeline.read import CONTROLLER, Process, TimedSpan

Steps: TypeAlias = tuple[int, int]
"""First and last."""
_STEPS = re.compile(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?")


def parse_steps(words: str) -> Steps:
    """First and last step of `3-5`, or of `3`.

    Example:
        >>> parse_steps("3-5"), parse_steps("3")
        ((3, 5), (3, 3))
    """
    found = _STEPS.fullmatch(words)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < first <= last:
        why = "it is a step, or a first and a last one"
        raise UserError("--steps", words, why, "give numbers from 1 on, such as 3-5")
    return first, last


def windows(processes: Sequence[Process], steps: Steps | None) -> list[Interval]:
    """From the beginning of the first of the steps to the end of the last, in each session.

    A run that was taken up again has a controller for each session.
    """
    first, last = steps or (1, 1 << 62)
    found: list[Interval] = []
    for process in processes:
        if process.role == CONTROLLER:
            mine = [s for s in process.spans if s.step is not None and first <= s.step <= last]
            if mine:
                found.append((min(s.start for s in mine), max(s.end for s in mine)))
    if not found:
        asked = "any step" if steps is None else f"steps {first} to {last}"
        why = f"the run has no spans of {asked}"
        raise UserError("--steps", None if steps is None else asked, why, "name steps it has done")
    return union(found)


def inside(processes: Sequence[Process], times: Sequence[Interval]) -> list[Process]:
    """Every process with the spans that lie in these times, at least in part."""

    def is_inside(span: TimedSpan) -> bool:
        return any(span.start < end and span.end > start for start, end in times)

    kept = [replace(p, spans=tuple(filter(is_inside, p.spans))) for p in processes]
    return [process for process in kept if process.spans]
