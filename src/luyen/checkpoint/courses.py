"""Checkpoints that a run leaves behind when it goes on from an earlier one.

They are later than where it goes on, so they would pass for its newest ones: a resumption would
take them up, and retention would keep them in the place of those that are being made.
"""

import warnings
from pathlib import Path

from luyen.base.files import sync
from luyen.base.rundir import step_name
from luyen.checkpoint.store import CheckpointStore

_LEFT = "left-"


class LeftBehind(UserWarning):
    """Checkpoints were put aside, since the run went on from an earlier point."""


def leave_behind(store: CheckpointStore, step: int) -> list[Path]:
    """Put checkpoints of later steps aside under names that nothing takes for one; their places.

    Nothing is removed: whoever wants one back renames it.
    """
    moved: list[Path] = []
    for later in (number for number in store.list() if number > step):
        place = _free(store.directory, step_name(later))
        store.part_with(later)
        store.path(later).rename(place)
        moved.append(place)
    if moved:
        sync(store.directory)
        names = ", ".join(path.name for path in moved)
        said = f"the run goes on after step {step}; what it left behind there is in "
        warnings.warn(f"{said}{store.directory}: {names}", LeftBehind, stacklevel=3)
    return moved


def _free(folder: Path, name: str) -> Path:
    place, number = folder / f"{_LEFT}{name}", 1
    while place.exists():
        number += 1
        place = folder / f"{_LEFT}{name}-{number}"
    return place
