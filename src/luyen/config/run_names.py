"""How a run is called that nobody gave a name, and which words go on with one that has it."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from luyen.base.errors import UserError
from luyen.base.rundir import RunDirectory
from luyen.config.tree import Tree, nested


def name_after(files: Sequence[Path], now: datetime | None = None) -> Tree:
    """The name of a new run: its last configuration file and the time; nothing without a file.

    Two runs without a name are two runs, whatever their files say.

    Example:
        >>> name_after([Path("math/grpo.yaml")], datetime(2026, 1, 2, 3, 4, 5)).values
        {'trainer': {'experiment_name': 'grpo-20260102-030405'}}
    """
    if not files:
        return Tree(values={}, origins={})
    when = now or datetime.now().astimezone()
    name = f"{files[-1].stem}-{when:%Y%m%d-%H%M%S}"
    return Tree(values=nested(["trainer", "experiment_name"], name), origins={})


def words_to_go_on(run: Path) -> tuple[Path, list[str]]:
    """The configuration of a run, and the overrides that name its place: what `train` goes on with.

    A UserError where there is no run.
    """
    directory = RunDirectory.open(run)
    place = directory.root.resolve()
    if len(place.parts) < 4:
        why = "a run lies two folders below the one that trainer.default_local_dir names"
        raise UserError("--resume", str(run), why, "move it to DIR/PROJECT/EXPERIMENT")
    names = {
        "default_local_dir": place.parent.parent,
        "project_name": place.parent.name,
        "experiment_name": place.name,
        "resume_mode": "auto",
    }
    overrides = [f"trainer.{key}={json.dumps(str(value))}" for key, value in names.items()]
    return directory.config, [*overrides, "trainer.resume_from_path=null"]
