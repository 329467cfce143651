"""Set up a run: plugins, tokenizer, display, rows, manifest, checkpoint to resume from."""

import importlib.util
import itertools
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from luyen.base.boundary import boundary, last_line
from luyen.base.digests import BEGINNING, StepDigest, read_digests
from luyen.base.errors import UserError
from luyen.base.input_files import expanded
from luyen.base.run_lock import refuse_claimed
from luyen.base.rundir import DamagedRecord, RunDirectory
from luyen.base.seeds import derive_key
from luyen.checkpoint.store import Checkpoint, CheckpointStore, verify
from luyen.checkpoint.superseded import archive_superseded
from luyen.checkpoint.tensors import load_state
from luyen.config.check import Report
from luyen.config.loader.parse import masked_values
from luyen.config.named_files import named_fingerprints
from luyen.config.pipeline import run_directory
from luyen.config.schema.run import RunConfig
from luyen.data.build import TrainData, build_data
from luyen.data.sources import Offered
from luyen.data.tokenizer import Tokenizer, load_tokenizer
from luyen.rollout.build import stop_tokens
from luyen.telemetry.display import Display, SilentDisplay
from luyen.telemetry.manifest import Manifest, collect
from luyen.telemetry.metrics import read_metrics
from luyen.telemetry.output import open_safe_display
from luyen.telemetry.progress import explain_if_slow
from luyen.telemetry.remote_sinks import RunIdentity
from luyen.train.state import first_logged_step


def warn_of_history_gaps(directory: RunDirectory, resumed: Checkpoint, *, first: int) -> None:
    """Warn of missing lines in digests and metrics before the checkpoint; the run continues.

    `first` is the step whose line comes next. A damaged line is a UserError. Checkpoints of
    another run are not checked.
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
    """Gaps in the digest lines that should lead to the chain of a checkpoint."""
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


def open_run_display(config: RunConfig) -> Display:
    """The display of the run: console if `trainer.logger` has it, else silent."""
    return open_safe_display() if "console" in config.trainer.logger else SilentDisplay()


def load_rows(
    config: RunConfig, tokenizer: Tokenizer, display: Display, *, offered: Offered | None = None
) -> TrainData:
    """Load the rows; the display shows a message when it takes long.

    `offered` says which tools a prompt gets.
    """
    words = "preparing rows: reading, checking and measuring data.train_files and data.val_files"
    with explain_if_slow(display.waiting, words):
        return build_data(
            config.data,
            tokenizer=tokenizer,
            seed=config.trainer.seed,
            offered=offered,
        )


def refuse_running(report: Report) -> None:
    """A UserError where another process has claimed the run; checked before slow work."""
    refuse_claimed(run_directory(report.config))


def collect_manifest(config: RunConfig, data: TrainData) -> Manifest:
    """Manifest: hardware, versions, seeds, fingerprints of datasets and named files."""
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


def find_resume_checkpoint(
    report: Report, store: CheckpointStore, directory: RunDirectory
) -> Checkpoint | None:
    """The checkpoint to resume from, if `resume_mode` finds one; later ones are set aside.

    A UserError when there are checkpoints and none is valid: a restart would drop everything that
    the run has written. Warns of missing log lines before the checkpoint.
    """
    trainer = report.config.trainer
    found = None
    has_own = report.goes_on and bool(store.list())
    if trainer.resume_mode == "path" and trainer.resume_from_path is not None and not has_own:
        found = verify(expanded(trainer.resume_from_path))
    elif trainer.resume_mode == "auto" or has_own:
        found = store.newest_sound()
        if found is None and store.list():
            _refuse_restart(store)
    if found is not None:
        archive_superseded(store, found.step, source=found.path)
        warn_of_history_gaps(
            directory, found, first=first_logged_step(load_state(found.path, "loop"))
        )
    return found


def _refuse_restart(store: CheckpointStore) -> None:
    newest = store.list()[-1]
    try:
        store.load(newest)
    except UserError as error:
        why = f"none of {len(store.list())} can be used; {error.value}: {error.why}"
        fix = "restore one from a copy, or start a new run with another trainer.experiment_name"
        raise UserError("checkpoints", str(store.directory), why, fix) from error


def run_identity(report: Report, directory: RunDirectory) -> RunIdentity:
    """Name and configuration of the run for its loggers."""
    trainer = report.config.trainer
    return RunIdentity(
        run_id=directory.run_id,
        project=trainer.project_name,
        experiment=trainer.experiment_name,
        config=masked_values(report.config),
    )


def import_plugins(paths: tuple[str, ...]) -> None:
    """Import each plugin file once in this process; a UserError when one raises."""
    for path in paths:
        file = expanded(path).resolve()
        name = f"luyen_plugin_{derive_key(0, str(file)):x}"
        if name in sys.modules:
            continue
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None, f"{path} passed the check of trainer.plugins"
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        faults: list[BaseException] = []
        with boundary(faults):
            spec.loader.exec_module(module)
        if faults:
            raise _broken(path, faults[0]) from faults[0]
        sys.modules[name] = module


def _broken(path: str, fault: BaseException) -> UserError:
    if isinstance(fault, UserError):
        return fault
    why = f"importing it failed: {last_line(fault)}"
    return UserError("trainer.plugins", path, why, "correct the plugin file")


def load_run_tokenizer(config: RunConfig) -> Tokenizer:
    """The tokenizer of a run."""
    model = config.actor_rollout_ref.model
    return load_tokenizer(
        model.tokenizer_path or model.path,
        trust_remote_code=model.trust_remote_code,
        model_path=model.path,
        more_stops=stop_tokens(config.actor_rollout_ref.rollout.multi_turn),
    )
