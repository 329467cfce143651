"""Answers of the processes of a cluster, with what each tells of itself."""

from dataclasses import dataclass
from typing import Any, final

from luyen.base.foreign import boundary
from luyen.runtime.watch import RoleWatch
from luyen.telemetry.process_report import ProcessReport


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What a call returned, and a report beside it.

    Example:
        >>> Answered(value=3, report=None).value
        3
    """

    value: Any
    """What was asked for."""
    report: ProcessReport | None
    """How the process stands; None: nobody would hear it."""


def opened(
    answer: Answered, watch: RoleWatch, role: str, index: int, *, sent: float, back: float
) -> Any:
    """What was asked for; the report goes to the watch, which can spoil nothing."""
    if answer.report is not None:
        with boundary([]):
            watch.heard(role, index, answer.report, sent=sent, back=back)
    return answer.value
