"""Whether the record of a run leads up to the checkpoint it goes on from.

A line that was changed is found by its own checksum; lines that are missing are found here. The run
goes on: what it does depends on the checkpoint alone. But nobody should learn of the gap later.
"""

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path

from luyen.base.digests import BEGINNING, StepDigest, read_digests
from luyen.base.rundir import DamagedRecord, RunDirectory
from luyen.checkpoint.store import Checkpoint
from luyen.telemetry.metrics_file import read_metrics


def warn_of_gaps(directory: RunDirectory, resumed: Checkpoint, *, first: int) -> None:
    """Warn of lines that the run wrote before this checkpoint of its own, and that are gone.

    `first` is the step whose line comes next. A line that is not as it was written is a UserError.
    """
    if resumed.facts.get("run_id") != directory.run_id:
        return
    chain = resumed.facts.get("chain")  # None: a supervised run, which has no digests
    digests: list[StepDigest] = []
    if chain not in (None, BEGINNING):
        digests = _digests(directory.digests, resumed.step)
        for said in _unlinked(digests, chain, resumed.step):
            warnings.warn(f"{directory.digests}: {said}", DamagedRecord, stacklevel=4)
    measured = _measured(directory.metrics)
    wanted = ({digest.step for digest in digests} | {*range(resumed.step, first)}) - {0}
    missing = sorted(wanted - measured)
    if missing:
        said = f"{directory.metrics}: it has no line of {_named(missing)}"
        warnings.warn(said, DamagedRecord, stacklevel=4)


def _digests(path: Path, last: int) -> list[StepDigest]:
    found = read_digests(path) if path.is_file() else []
    return sorted((d for d in found if d.step <= last), key=lambda d: d.step)


def _measured(path: Path) -> set[int]:
    return {line.step for line in read_metrics(path)} if path.is_file() else set()


def _unlinked(digests: list[StepDigest], chain: str, step: int) -> Iterator[str]:
    """What is wrong with lines that should lead to the chain of a checkpoint."""
    if not digests:
        yield f"it has no line of the steps up to {step}; digests go on without them"
    elif digests[-1].chain != chain:
        yield f"its lines do not lead to the checkpoint of step {step}: some are missing"
    for before, after in itertools.pairwise(digests):
        if after.previous != before.chain:
            yield f"step {after.step} does not follow step {before.step}: lines are missing"


def _named(steps: list[int]) -> str:
    """A few steps by their numbers.

    Example:
        >>> _named([3]), _named([3, 4, 5])
        ('step 3', '3 steps (3 to 5)')
    """
    one = f"step {steps[0]}"
    return one if len(steps) == 1 else f"{len(steps)} steps ({steps[0]} to {steps[-1]})"
