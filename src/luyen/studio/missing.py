"""What a run must have written and is not there, told from its other files.

A changed file is found by its own seal or checksum. One that is gone, or has lost its last lines,
looks like that of a run that did less; only the other files know better.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from luyen.base.digests import read_digests
from luyen.base.errors import UserError
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.store import CheckpointStore, read_manifest
from luyen.telemetry.metrics_file import read_metrics

_REWARDS = "rewards"
"""The stage that only steps with rollouts have."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Something that a file should hold.

    Example:
        >>> Missing(path=Path("digests.jsonl"), why="it has no line of step 3").is_damage
        True
    """

    path: Path
    """The file."""
    why: str
    """What is missing, and which file knows of it."""
    is_damage: bool = True
    """Whether only damage explains it; rollouts are also removed by people who need room."""


def missing_parts(run: RunDirectory) -> list[Missing]:
    """What is missing of a run. A file that cannot be read is no witness.

    A step writes its rollouts, its digest, its metrics and its checkpoint, in this order. Files are
    read so that a run that goes on meanwhile is not accused.
    """
    try:
        saved = CheckpointStore(run.checkpoints).list()
        before = _measured(run)
        digested, drawn = _digested(run)
        after = _measured(run)
        chained = [step for step in saved if _is_chained(run.checkpoint(step))]
        keeps = run.metrics.is_file() or _keeps_metrics(run)
    except UserError:
        return []
    lost = (digested - after) - _unsure(digested, saved) if keeps else set[int]()
    return [
        *_lines(run.digests, before - digested if digested else set(), run.metrics),
        *_whole(run.digests, bool(chained and not digested)),
        *_lines(run.metrics, lost, run.digests),
        *_rollouts(run, drawn),
    ]


def _lines(path: Path, steps: set[int], witness: Path) -> Iterator[Missing]:
    if steps:
        first, last = min(steps), max(steps)
        named = f"step {first}" if first == last else f"{len(steps)} steps, {first} to {last}"
        yield Missing(path=path, why=f"it has no line of {named}, and {witness.name} has")


def _whole(path: Path, is_lost: bool) -> Iterator[Missing]:
    if is_lost:
        yield Missing(path=path, why="it is missing or empty, and checkpoints hold its chain")


def _rollouts(run: RunDirectory, drawn: set[int]) -> Iterator[Missing]:
    gone = [step for step in sorted(drawn) if not run.rollouts(step).is_file()]
    if gone:
        more = f", and so are those of {len(gone) - 1} more steps" if len(gone) > 1 else ""
        why = f"it is missing{more}, and {run.digests.name} has the step"
        yield Missing(path=run.rollouts(gone[0]), why=why, is_damage=False)


def _unsure(digested: set[int], saved: tuple[int, ...]) -> set[int]:
    """The last digest: a process may be killed before it writes the metrics of the step.

    Not where there is a checkpoint of the step, which comes after both.
    """
    return {max(digested)} - set(saved) if digested else set()


def _digested(run: RunDirectory) -> tuple[set[int], set[int]]:
    """Steps that have a digest, and those of them that drew rollouts: offline ones do not."""
    found = read_digests(run.digests) if run.digests.is_file() else []
    drawn = {digest.step for digest in found if _REWARDS in digest.stages}
    return {digest.step for digest in found}, drawn


def _measured(run: RunDirectory) -> set[int]:
    found = read_metrics(run.metrics) if run.metrics.is_file() else []
    return {line.step for line in found}


def _is_chained(checkpoint: Path) -> bool:
    return read_manifest(checkpoint)["facts"].get("chain") is not None


def _keeps_metrics(run: RunDirectory) -> bool:
    return "jsonl" in (run.read_settings().get("trainer") or {}).get("logger", ())
