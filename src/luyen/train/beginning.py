"""What every run begins with: display, rows, directory, checkpoint, its name in the logs."""

from pathlib import Path

import torch

from luyen.base.claims import refuse_claimed
from luyen.base.errors import UserError
from luyen.base.paths import expanded
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.courses import leave_behind
from luyen.checkpoint.store import Checkpoint, CheckpointStore, verify
from luyen.checkpoint.tensors import load_state
from luyen.config.check import Report
from luyen.config.named_files import named_fingerprints
from luyen.config.pipeline_check import run_directory
from luyen.config.schema.run import RunConfig
from luyen.config.written import shown
from luyen.data.build import TrainData, build_data
from luyen.data.tokenizer import Tokenizer
from luyen.data.tools import Offered
from luyen.telemetry.display import Display, SilentDisplay
from luyen.telemetry.manifest import Manifest, collect
from luyen.telemetry.output import open_steady_display
from luyen.telemetry.patience import explained
from luyen.telemetry.sinks import RunIdentity
from luyen.train.gaps import warn_of_gaps
from luyen.train.state import first_line


def open_run_display(config: RunConfig) -> Display:
    """What a person sees of the run, as `trainer.logger` has it."""
    return open_steady_display() if "console" in config.trainer.logger else SilentDisplay()


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


def refuse_running(report: Report) -> None:
    """A UserError where another process has the run, before anything long is done for nothing."""
    refuse_claimed(run_directory(report.config))


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
        leave_behind(store, found.step, source=found.path)
        warn_of_gaps(directory, found, first=first_line(load_state(found.path, "loop")))
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
        config=shown(report.config),
    )
