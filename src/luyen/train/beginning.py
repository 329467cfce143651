"""What every run begins with: display, rows, directory, checkpoint, its name in the logs."""

import warnings
from pathlib import Path
from typing import Any

import torch
import yaml

from luyen.base.claims import claim
from luyen.base.errors import UserError
from luyen.base.paths import expanded
from luyen.base.rundir import DamagedRecord, RunDirectory
from luyen.checkpoint.courses import leave_behind
from luyen.checkpoint.store import Checkpoint, CheckpointStore, verify
from luyen.config.check import Report
from luyen.config.named_files import named_fingerprints
from luyen.config.schema.run import RunConfig
from luyen.data.build import TrainData, build_data
from luyen.data.tokenizer import Tokenizer
from luyen.data.tools import Offered
from luyen.telemetry.display import Display, SilentDisplay, open_display
from luyen.telemetry.manifest import Manifest, collect
from luyen.telemetry.patience import explained
from luyen.telemetry.sinks import RunIdentity
from luyen.train.gaps import warn_of_gaps
from luyen.train.lineage import inputs_of, note_inputs

_COMPARED = ("versions", "code", "hardware", "settings", "threads", "datasets", "files", "revision")
"""Facts that a resumption lists when they are not those of the beginning."""


def open_run_display(config: RunConfig) -> Display:
    """What a person sees of the run, as `trainer.logger` has it."""
    return open_display() if "console" in config.trainer.logger else SilentDisplay()


def prepare_rows(
    config: RunConfig, tokenizer: Tokenizer, display: Display, *, offered: Offered | None = None
) -> TrainData:
    """The rows of the run; the display says what is done when it takes long.

    `offered` says which tools a prompt gets.
    """
    words = "preparing rows: reading, checking and measuring data.train_files and data.val_files"
    with explained(display.waiting, words):
        return build_data(
            config.data,
            tokenizer=tokenizer,
            seed=config.trainer.seed,
            offered=offered,
        )


def open_directory(report: Report, data: TrainData, found: Manifest) -> RunDirectory:
    """The run's directory: an earlier one to go on with, or a new one with its facts written.

    `found` is what `facts_of` gave.
    """
    trainer = report.config.trainer
    root = expanded(trainer.default_local_dir)
    place = root / trainer.project_name / trainer.experiment_name
    config = yaml.safe_dump(report.config.model_dump(mode="json"), sort_keys=False)
    provenance = {key: str(origin) for key, origin in report.origins.items()}
    facts = found.as_json() | {"rows": {"train": len(data.train.prompts)}}
    inputs = inputs_of(report.config, found.datasets)
    if RunDirectory(place).exists and trainer.resume_mode != "disable":
        directory = RunDirectory.open(place)
        _refuse_other_stage(directory, trainer.stage)
        claim(directory.manifest)
        directory.note_resumption(_resumption(directory, config, facts))
        # What is trained from here on follows the configuration of now.
        directory.write_config(config, provenance)
        note_inputs(directory, report.config, inputs)
        return directory
    made = RunDirectory.create(place, config=config, provenance=provenance, manifest=facts)
    claim(made.manifest)
    note_inputs(made, report.config, inputs)
    return made


def _refuse_other_stage(directory: RunDirectory, stage: str) -> None:
    """A UserError, before anything is written, where the run there learned in another way."""
    try:
        written = yaml.safe_load(directory.read_config())
    except UserError:
        return  # damaged: what goes on from it is told by the checkpoints
    made = (written.get("trainer") or {}).get("stage", "rl")
    if made != stage:
        why = f"the run in {directory.root} is of the stage `{made}`"
        fix = "set another trainer.experiment_name; its exported model may be model.path"
        raise UserError("trainer.stage", stage, why, fix)


def facts_of(config: RunConfig, data: TrainData) -> Manifest:
    """What this process runs the configuration on and with, content of named files included."""
    datasets = {"train": data.train.fingerprint}
    if data.validation is not None:
        datasets["validation"] = data.validation.fingerprint
    return collect(
        seeds={"run": config.trainer.seed},
        datasets=datasets,
        gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        threads={"torch": torch.get_num_threads()},
        files=named_fingerprints(config, folder=Path.cwd()),
        folder=Path.cwd(),
    )


def _resumption(directory: RunDirectory, config: str, facts: dict[str, Any]) -> dict[str, Any]:
    """What a reader must know of the session that begins: its facts, and which of them are new."""
    before = directory.read_manifest()
    new = [kind for kind in _COMPARED if facts[kind] != before.get(kind)]
    return {
        "checkpoint": CheckpointStore(directory.checkpoints).latest(),
        "command": facts["command"],
        "versions": facts["versions"],
        "is_config_new": _is_new(directory, config),
        "changed": {kind: facts[kind] for kind in new},
    }


def _is_new(directory: RunDirectory, config: str) -> bool:
    """Whether the configuration is another than before; a damaged one is about to be replaced."""
    try:
        return directory.read_config() != config
    except UserError as error:
        said = f"{error.value}: {error.why}; it is written anew, with the configuration of now"
        warnings.warn(said, DamagedRecord, stacklevel=4)
        return True


def find_checkpoint(
    report: Report, store: CheckpointStore, directory: RunDirectory
) -> Checkpoint | None:
    """The checkpoint to resume from, if `resume_mode` finds one; later ones are put aside.

    A UserError when there are checkpoints and none is sound: to begin anew would drop everything
    that the run has written so far. A warning where what is written does not lead up to it.
    """
    trainer = report.config.trainer
    found = None
    has_own = report.goes_on and bool(store.list())
    if trainer.resume_mode == "path" and trainer.resume_from_path is not None and not has_own:
        found = verify(expanded(trainer.resume_from_path))
    elif trainer.resume_mode == "auto" or has_own:
        found = store.newest_sound()
        if found is None and store.list():
            _refuse_to_begin_anew(store)
    if found is not None:
        leave_behind(store, found.step)
        warn_of_gaps(directory, found, has_metrics="jsonl" in trainer.logger)
    return found


def _refuse_to_begin_anew(store: CheckpointStore) -> None:
    newest = store.list()[-1]
    try:
        store.load(newest)
    except UserError as error:
        why = f"none of {len(store.list())} can be used; {error.value}: {error.why}"
        fix = "restore one from a copy; or begin anew with another trainer.experiment_name"
        raise UserError("checkpoints", str(store.directory), why, fix) from error


def identity(report: Report, directory: RunDirectory) -> RunIdentity:
    """How the run is called in every log."""
    trainer = report.config.trainer
    return RunIdentity(
        run_id=directory.run_id,
        project=trainer.project_name,
        experiment=trainer.experiment_name,
        config=report.config.model_dump(mode="json"),
    )
