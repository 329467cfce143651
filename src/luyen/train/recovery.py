"""Ranks that are lost do not end a run: it goes on from its newest checkpoint and the journal.

Everything is closed and made again, as the same command in a new process would: there is one way
to go on, and it is the one that is tested by killing processes.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import final

from luyen.base.errors import UserError
from luyen.config.check import Report
from luyen.runtime.ray.wire import RanksLost
from luyen.telemetry.output import say
from luyen.telemetry.spans import SPANS, span
from luyen.telemetry.summary import Summary
from luyen.train.run import OnlineRun

_MOST = 3
_PAUSES_S = (1.0, 30.0)
"""Before each new beginning: a cluster may take a while to notice what it has lost."""


@final
class Losses:
    """Losses in a row: without a step in between that was never reached before.

    Example:
        >>> losses = Losses(most=2)
        >>> losses.note(RanksLost("rank 1 is gone"), step=3)
        'rank 1 is gone (1 of 2 in a row)'
        >>> losses.note(RanksLost("rank 0 is gone"), step=4)
        'rank 0 is gone (1 of 2 in a row)'
    """

    def __init__(self, *, most: int = _MOST) -> None:
        self._most = most
        self._count = 0
        self._furthest = -1

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next beginning."""
        return _PAUSES_S[min(self._count, len(_PAUSES_S)) - 1]

    def note(self, lost: RanksLost, *, step: int) -> str:
        """What is said of a loss after `step` finished steps; a UserError after too many."""
        self._count = 1 if step > self._furthest else self._count + 1
        self._furthest = max(step, self._furthest)
        if self._count >= self._most:
            raise stopped(lost, f"this happened {self._count} times in a row after step {step}")
        return f"{lost} ({self._count} of {self._most} in a row)"


def stopped(lost: RanksLost, why_now: str) -> UserError:
    """A clean end: what is done stays done."""
    fix = (
        "look at the memory and the logs of its node; luyen train --resume RUN goes on from the "
        "newest checkpoint and the journal"
    )
    return UserError("trainer.n_gpus_per_node", "ranks", f"{lost}; {why_now}", fix)


def going_on(report: Report) -> Report:
    """The same run, to be gone on with, however it was begun.

    One that began from a checkpoint elsewhere does so again until it has one of its own.
    """
    mode = report.config.trainer.resume_mode
    if mode != "disable":
        return replace(report, goes_on=True)
    trainer = report.config.trainer.model_copy(update={"resume_mode": "auto"})
    return replace(report, config=report.config.model_copy(update={"trainer": trainer}))


def until_done(
    report: Report,
    prepare: Callable[[Report], OnlineRun],
    carry_out: Callable[[OnlineRun], Summary],
) -> Summary:
    """Prepare a run and carry it out, again when its ranks were lost; what it reached."""
    losses = Losses()
    run: OnlineRun | None = None
    while True:
        try:
            run = _prepared(report, prepare, before=run)
            return carry_out(run)
        except RanksLost as lost:
            if run is not None and run.interruption.is_wanted:
                raise stopped(lost, "the run was asked to end") from lost
            said = losses.note(lost, step=run.step if run is not None else 0)
            say(f"{said}; beginning again from the newest checkpoint")
            report = going_on(report)
            time.sleep(losses.pause_s)


def _prepared(
    report: Report, prepare: Callable[[Report], OnlineRun], *, before: OnlineRun | None
) -> OnlineRun:
    """The run where its newest checkpoint left it; the time it took is in the run's events."""
    if before is None:
        return prepare(report)
    SPANS.open(before.recorder.directory.events, process="controller")
    with span("recover", step=before.step + 1):
        return prepare(report)
