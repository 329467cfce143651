"""The points at which a run is killed, by name: which call of which function, before or after it.

Nothing in the product knows of them: a process that is to die wraps the function first.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from inspect import iscoroutinefunction
from typing import Any, Literal, final

from luyen.telemetry.journal import JournalFile


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Where a process dies."""

    where: str
    """Dotted name of the function: `module:name` or `module:Class.name`."""
    when: Literal["before", "after", "torn"]
    """Before the call, after it, or in the middle of a write."""
    calls: tuple[int, ...]
    """Which calls, counted from 1: each is a case of its own."""
    tools_only: bool = False
    """Whether only runs with tools come by."""


POINTS: dict[str, Point] = {
    "the directory is made, its manifest is not": Point(
        where="luyen.base.rundir:write_whole", when="before", calls=(1, 3)
    ),
    "the first validation is generated": Point(
        where="luyen.train.validation:score_groups", when="before", calls=(1,)
    ),
    "some rollouts are generated": Point(
        where="luyen.telemetry.journal:WorkJournal.keep_rollout", when="after", calls=(1, 13, 30)
    ),
    "a record of the journal is torn": Point(
        where="luyen.telemetry.journal:JournalFile._write", when="torn", calls=(7, 24)
    ),
    "all rollouts are generated": Point(
        where="luyen.train.scoring:score_and_filter", when="before", calls=(1, 2, 3)
    ),
    "some rollouts are scored": Point(
        where="luyen.telemetry.journal:WorkJournal.keep_scores", when="after", calls=(10, 14)
    ),
    "all rollouts are scored": Point(
        where="luyen.train.loop:generate_and_score", when="after", calls=(1, 2)
    ),
    "old log-probs and values are there": Point(
        where="luyen.train.loop:prepare_batch", when="after", calls=(1, 2, 3)
    ),
    "advantages are there": Point(
        where="luyen.train.loop:group_advantages", when="after", calls=(2,)
    ),
    "the critic is updated, the policy is not": Point(
        where="luyen.train.update:_start_actor", when="before", calls=(1, 2)
    ),
    "between two optimizer steps": Point(
        where="luyen.engine.optim:MasterOptimizer.step", when="after", calls=(1, 3, 6)
    ),
    "everything is updated": Point(
        where="luyen.train.loop:finish_step", when="before", calls=(1, 3)
    ),
    "the rollouts of the step are not in place": Point(
        where="luyen.telemetry.rollout_files:write_whole", when="before", calls=(1, 2)
    ),
    "the rollouts of the step are in place": Point(
        where="luyen.telemetry.rollout_files:write_whole", when="after", calls=(2, 3)
    ),
    "a later validation is generated": Point(
        where="luyen.train.validation:score_groups", when="before", calls=(2,)
    ),
    "the digest is written, the metrics are not": Point(
        where="luyen.base.digests:DigestFile.write", when="after", calls=(1, 2, 4)
    ),
    "the metrics are written": Point(
        where="luyen.telemetry.sinks:MetricLog.write", when="after", calls=(2, 3)
    ),
    "inside the writing of a checkpoint": Point(
        where="luyen.checkpoint.store:sync", when="before", calls=(1, 3)
    ),
    "a checkpoint is written and not in place": Point(
        where="luyen.checkpoint.store:CheckpointStore._put", when="before", calls=(1, 2)
    ),
    "a checkpoint is in place, the journal too": Point(
        where="luyen.telemetry.journal:WorkJournals.forget", when="before", calls=(2, 3)
    ),
    "an old checkpoint goes": Point(
        where="luyen.checkpoint.store:CheckpointStore._retire", when="after", calls=(2,)
    ),
    "training is over": Point(
        where="luyen.train.start:train_online", when="after", calls=(1,)
    ),
    "a tool is about to be called": Point(
        where="luyen.telemetry.journal:WorkJournal.intend",
        when="after",
        calls=(1, 9),
        tools_only=True,
    ),
    "a tool is at work": Point(
        where="luyen.rollout.tools.rollout_tools:call_with_retries",
        when="after",
        calls=(2, 11),
        tools_only=True,
    ),
    "the result of a tool is written": Point(
        where="luyen.telemetry.journal:WorkJournal.keep_call",
        when="after",
        calls=(3, 8),
        tools_only=True,
    ),
}  # fmt: skip


def kill_self() -> None:
    """End this process at once, as any other could."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: Point, call: int, *, die: Callable[[], None] = kill_self) -> None:
    """Let this process die at the point, if `die` does not think better of it."""
    module, _, path = point.where.partition(":")
    owner: Any = import_module(module)
    *above, name = path.split(".")
    for one in above:
        owner = getattr(owner, one)
    setattr(owner, name, _deadly(getattr(owner, name), point, call, die))


def _deadly(
    function: Callable[..., Any], point: Point, call: int, die: Callable[[], None]
) -> Callable[..., Any]:
    counted = [0]

    def is_due() -> bool:
        counted[0] += 1
        return counted[0] == call

    if iscoroutinefunction(function):

        @wraps(function)
        async def later(*args: Any, **kwargs: Any) -> Any:
            due = is_due()
            found = await function(*args, **kwargs)
            die() if due else None
            return found

        return later

    @wraps(function)
    def now(*args: Any, **kwargs: Any) -> Any:
        due = is_due()
        if due and point.when == "before":
            die()
        if due and point.when == "torn":
            _tear(*args)
        found = function(*args, **kwargs)
        if due and point.when == "after":
            die()
        return found

    return now


def _tear(file: JournalFile, record: Any) -> None:
    os.write(file._handle, b'{"kind": "rollout", "key": "' + repr(record)[:40].encode())
    kill_self()
