"""What a reader of a replay must know, and numbers side by side."""

from collections.abc import Mapping, Sequence

from luyen.telemetry.manifest import collect
from luyen.train.replay.rebuild import StepCheck
from luyen.train.replay.record import RunRecord
from luyen.train.replay.results import Number

_PARTED = "the weights before the step are not those of the run, so neither is what follows"


def paired(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Number]:
    """Every number of either side, beside that of the other."""
    names = sorted(before.keys() | after.keys())
    return {name: Number(before=before.get(name), after=after.get(name)) for name in names}


def notes_on(record: RunRecord, step: int, checks: Sequence[StepCheck]) -> list[str]:
    """What could not be compared, and what may explain a difference."""
    notes: list[str] = []
    if step not in record.metrics:
        notes.append("metrics.jsonl does not have the step: numbers are compared with nothing")
    if any(one.unequal for one in checks[:-1]):
        notes.append(_PARTED)
    if any(one.unequal for one in checks):
        notes += _elsewhere(record)
    return notes


def _elsewhere(record: RunRecord) -> list[str]:
    """What of the machine and its packages is not as it was when the run began."""
    written = record.directory.read_manifest()
    here = collect(seeds={}, datasets={}).as_json()
    pairs = {
        f"{kind}.{name}": (written.get(kind, {}).get(name), here[kind].get(name))
        for kind, names in (
            ("versions", here["versions"]),
            ("settings", written.get("settings", {}).keys() | here["settings"].keys()),
            ("hardware", ("processor", "machine")),
        )
        for name in names
    }
    return [
        f"not as when the run began: {name} was {before}, is {now}"
        for name, (before, now) in sorted(pairs.items())
        if before != now
    ]
