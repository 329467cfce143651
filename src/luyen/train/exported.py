"""A checkpoint as a Hugging Face directory: whole or not at all, and noted by its run."""

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from luyen.base.errors import UserError
from luyen.base.files import writing
from luyen.base.leftovers import in_progress, sweep_beside, temporary_beside
from luyen.base.rundir import DamagedRecord, RunDirectory
from luyen.config.trust import require_trust
from luyen.models.export import (
    adapter_layers,
    export_adapter,
    export_merged,
    export_model,
    export_tokenizer,
)
from luyen.models.silence import no_progress_bars
from luyen.telemetry.artifacts import Kind
from luyen.train.checkpointed import find_checkpoint, open_checkpoint, read_config
from luyen.train.exported_scorer import fill_scorer
from luyen.train.lineage import note_export

_SCORER = "reward_model"
_ELSEWHERE = "make room, mend the permissions, or name another directory"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written.

    Example:
        >>> Exported(source="runs/a/b/checkpoints/step_000002", what="a whole model").what
        'a whole model'
    """

    source: str
    """The checkpoint, or the model that was copied."""
    what: str
    """What the directory holds now, in words."""


def export_checkpoint(
    path: str, directory: Path, *, merge: bool | None, is_trusted: bool = False
) -> Exported:
    """Write what a path means into a directory, which must be empty or absent.

    Of a run directory it is the newest sound checkpoint. `merge` None merges an adapter where there
    is one. A run of somebody else that names code is refused unless it `is_trusted`.
    """
    found = find_checkpoint(path)
    if found is not None and (home := found.path.parent.parent / "config.yaml").is_file():
        require_trust(RunDirectory(home.parent), is_trusted=is_trusted)
    kind: Kind = "export"
    if found is not None and _stage_of(found.path) == _SCORER:
        if merge:
            raise UserError("--merge", True, "a reward model has no adapter", "drop --merge")
        kind, checkpoint = "reward_model", found.path
        made = _written(directory, lambda folder: _scorer(checkpoint, folder))
    else:
        made = _written(directory, lambda folder: _policy(path, folder, merge, is_trusted))
    if found is not None:
        _note(found.path, directory, kind)
    return made


def _stage_of(checkpoint: Path) -> str:
    file = checkpoint.parent.parent / "config.yaml"
    return read_config([file], []).trainer.stage if file.is_file() else "rl"


def _written(directory: Path, fill: Callable[[Path], Exported]) -> Exported:
    unfinished = temporary_beside(directory)
    try:
        with writing(directory, field="DIR", fix=_ELSEWHERE), in_progress(unfinished):
            directory.parent.mkdir(parents=True, exist_ok=True)
            sweep_beside(directory)
            unfinished.mkdir()
            with no_progress_bars():
                made = fill(unfinished)
            if directory.exists():
                directory.rmdir()
            unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return made


def _scorer(checkpoint: Path, folder: Path) -> Exported:
    config = read_config([checkpoint.parent.parent / "config.yaml"], [])
    fill_scorer(config, checkpoint, folder)
    model = config.actor_rollout_ref.model
    export_tokenizer(model.tokenizer_path or model.path, folder)
    return Exported(source=str(checkpoint), what="a reward model")


def _policy(path: str, folder: Path, merge: bool | None, is_trusted: bool) -> Exported:
    opened = open_checkpoint(path, keep_dtype=True, is_trusted=is_trusted)
    model, stop_ids = opened.config.actor_rollout_ref.model, opened.tokenizer.stop_ids
    has_adapter = bool(adapter_layers(opened.policy.model))
    if merge and not has_adapter:
        why, fix = "the checkpoint has no adapter to merge", "drop --merge"
        raise UserError("--merge", True, why, fix)
    if has_adapter and merge is not False:
        export_merged(opened.policy, model.path, folder, stop_ids=stop_ids)
        what = "a whole model, the adapter merged"
    elif has_adapter:
        export_adapter(opened.policy, model.path, folder)
        what = f"an adapter for {model.path}"
    else:
        export_model(opened.policy, folder, stop_ids=stop_ids)
        what = "a whole model"
    export_tokenizer(model.tokenizer_path or model.path, folder)
    return Exported(source=opened.name, what=what)


def _note(checkpoint: Path, directory: Path, kind: Kind) -> None:
    """An export is of use even where its run may only be read."""
    try:
        note_export(checkpoint, directory, kind)
    except UserError as error:
        said = f"the export is whole, but its run could not note it: {error}"
        warnings.warn(said, DamagedRecord, stacklevel=3)
