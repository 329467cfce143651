"""What every run begins with: display, rows, directory, checkpoint, its name in the logs."""

from pathlib import Path

import torch
import yaml

from luyen.base.files import json_page, write_whole
from luyen.base.paths import expanded
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.store import Checkpoint, CheckpointStore, verify
from luyen.config.check import Report
from luyen.config.schema.run import RunConfig
from luyen.data.build import TrainData, build_data
from luyen.data.tokenizer import Tokenizer
from luyen.data.tools import Offered
from luyen.telemetry.display import Display, SilentDisplay, open_display
from luyen.telemetry.manifest import collect
from luyen.telemetry.patience import explained
from luyen.telemetry.sinks import RunIdentity


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
            is_supervised=config.trainer.stage == "sft",
            offered=offered,
        )


def open_directory(report: Report, data: TrainData) -> RunDirectory:
    """The run's directory: an earlier one to go on with, or a new one with its facts written."""
    trainer = report.config.trainer
    root = expanded(trainer.default_local_dir)
    place = root / trainer.project_name / trainer.experiment_name
    config = yaml.safe_dump(report.config.model_dump(mode="json"), sort_keys=False)
    provenance = {key: str(origin) for key, origin in report.origins.items()}
    if RunDirectory(place).exists and trainer.resume_mode != "disable":
        directory = RunDirectory.open(place)
        # What is trained from here on follows the configuration of now.
        write_whole(directory.config, config)
        write_whole(directory.provenance, json_page(provenance))
        return directory
    datasets = {"train": data.train.fingerprint}
    if data.validation is not None:
        datasets["validation"] = data.validation.fingerprint
    facts = collect(
        seeds={"run": trainer.seed},
        datasets=datasets,
        threads={"torch": torch.get_num_threads()},
        folder=Path.cwd(),
    )
    return RunDirectory.create(
        place,
        config=config,
        provenance=provenance,
        manifest=facts.as_json(),
    )


def find_checkpoint(report: Report, store: CheckpointStore) -> Checkpoint | None:
    """The checkpoint to resume from, if `resume_mode` finds one."""
    trainer = report.config.trainer
    if trainer.resume_mode == "path" and trainer.resume_from_path is not None:
        return verify(expanded(trainer.resume_from_path))
    return store.newest_sound() if trainer.resume_mode == "auto" else None


def identity(report: Report, directory: RunDirectory) -> RunIdentity:
    """How the run is called in every log."""
    trainer = report.config.trainer
    return RunIdentity(
        run_id=directory.run_id,
        project=trainer.project_name,
        experiment=trainer.experiment_name,
        config=report.config.model_dump(mode="json"),
    )
