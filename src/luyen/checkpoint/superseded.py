"""Checkpoints put aside when a run resumes from an earlier one.

They are later than where it goes on, so they would pass for its newest ones: a resumption would
take them up, and retention would keep them in the place of those that are being made.
"""

import re
import warnings
from pathlib import Path

from luyen.base.files import remove, sync
from luyen.base.rundir import step_name
from luyen.checkpoint.store import CheckpointStore

_LEFT = "left-"
_NAMED = re.compile(_LEFT + r"step_\d+(-\d+)?")


class SupersededCheckpoints(UserWarning):
    """Checkpoints were put aside, since the run went on from an earlier point."""


def archive_superseded(
    store: CheckpointStore, step: int, *, source: Path | None = None
) -> list[Path]:
    """Put checkpoints of later steps aside under names that nothing takes for one; their places.

    To get one back, rename it. Of those that were put aside before, as many stay as the
    store keeps; all that are put aside now stay, and so does `source`, which the run goes on from.
    """
    _retire(store, source)
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
        warnings.warn(f"{said}{store.directory}: {names}", SupersededCheckpoints, stacklevel=3)
    return moved


def _retire(store: CheckpointStore, source: Path | None) -> None:
    """Remove all but the newest `keep` of what earlier sessions left behind."""
    if store.keep is None or not store.directory.is_dir():
        return
    left = [path for path in store.directory.iterdir() if _NAMED.fullmatch(path.name)]
    for path in sorted(left, key=lambda path: path.stat().st_ctime)[: -store.keep]:
        if source is None or path.resolve() != source.resolve():
            remove(path)


def _free(folder: Path, name: str) -> Path:
    place, number = folder / f"{_LEFT}{name}", 1
    while place.exists():
        number += 1
        place = folder / f"{_LEFT}{name}-{number}"
    return place
