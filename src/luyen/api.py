"""Check, train, evaluate and read runs from Python: what the commands do, as functions.

A configuration is given as YAML files, as mappings, or both; later ones win. Keys of a mapping are
nested or dotted: `{"trainer": {"seed": 1}}` is `{"trainer.seed": 1}`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, final

from luyen.base.errors import UserError
from luyen.base.process_setup import prepare_process
from luyen.base.rundir import RunDirectory
from luyen.config.check import Report
from luyen.config.check import check as check_files
from luyen.config.machine import this_machine
from luyen.config.resume import resume_arguments
from luyen.studio.runs import RunFacts, run_facts
from luyen.telemetry.metrics import read_metrics

if TYPE_CHECKING:
    import pyarrow as pa

Source: TypeAlias = str | Path | Mapping[str, Any]
"""A YAML file, or keys and values."""


def check(*sources: Source, **blocks: Any) -> Report:
    """Check a configuration as `luyen check` does: every problem at once, and the plan of the run.

    `blocks` are top-level blocks as keyword arguments: `check("a.yaml", trainer={"seed": 1})`.

    Example:
        >>> report = check({"trainer.total_training_steps": 0})
        >>> report.is_sound, "trainer.total_training_steps" in [p.field for p in report.problems]
        (False, True)
    """
    files, overrides = _split(sources, blocks)
    return check_files(files, overrides, machine=this_machine())


def train(*sources: Source, resume: "str | Path | Run | None" = None, **blocks: Any) -> "Run":
    """Train as `luyen train` does, and return the run.

    With `resume` the run there goes on; `sources` may then be mappings only. A UserError with every
    problem where the configuration has errors.
    """
    from luyen.sandbox.launch import missing

    files, overrides = _split(sources, blocks)
    if resume is not None:
        root = resume.root if isinstance(resume, Run) else Path(resume)
        if files:
            why = "the run has its own configuration"
            raise UserError("resume", str(root), why, "give mappings, and no file")
        file, place = resume_arguments(root)
        files, overrides = [file], [*overrides, *place]
    report = check_files(files, overrides, machine=this_machine(), missing_promises=missing)
    report.require_sound()
    prepare_process()
    # torch and everything above it load here, after the configuration has been found sound.
    from luyen.train.start import run_training

    run_training(report)
    trainer = report.config.trainer
    return load_run(
        Path(trainer.default_local_dir) / trainer.project_name / trainer.experiment_name
    )


def evaluate(model: "str | Path | Run", *sources: Source, **blocks: Any) -> dict[str, float]:
    """Measure a checkpoint, a run's newest checkpoint or a Hugging Face model on validation rows.

    `sources` and `blocks` go on top of the run's own configuration; they name rows and reward for a
    model that has none. Returns the `val/...` metrics, as a run's own validation reports them.
    """
    prepare_process()
    from luyen.pipeline.policy_loading import EvalOverrides, eval_config, open_checkpoint
    from luyen.studio.evaluation.evaluator import measure

    path = str(model.root if isinstance(model, Run) else model)
    files, overrides = _split(sources, blocks)
    opened = open_checkpoint(path, overrides, files=files)
    config = eval_config(opened.config, EvalOverrides())
    found = measure(replace(opened, config=config), progress=lambda _done, _total: None)
    return dict(found.metrics)


def load_run(path: str | Path) -> "Run":
    """The run in a directory; a UserError where there is none."""
    return Run(root=RunDirectory.open(path).root)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run directory, read on demand: a run in progress shows its newest state.

    Example:
        >>> Run(root=Path("runs/demo/first")).root.name
        'first'
    """

    root: Path
    """The run directory."""

    @property
    def facts(self) -> RunFacts:
        """State (`finished`, `running`, `interrupted`), steps, stage and newest measurement."""
        return run_facts(self.directory)

    @property
    def directory(self) -> RunDirectory:
        """Paths of everything that the run has written."""
        return RunDirectory(self.root)

    def config(self) -> dict[str, Any]:
        """The configuration with every key, as plain data."""
        return dict(self.directory.read_settings())

    def metrics(self) -> list[dict[str, float]]:
        """One row per step: its number under `step`, and every metric."""
        return [{"step": line.step, **line.values} for line in read_metrics(self.directory.metrics)]

    def rollouts(self, step: int) -> "pa.Table":
        """The rollouts of a step as an Arrow table; `.to_pandas()` where pandas is installed."""
        from luyen.telemetry.rollout_files import read_table

        return read_table(self.directory.rollouts(step))

    def checkpoints(self) -> list[Path]:
        """Checkpoint folders, the oldest first."""
        return sorted(self.directory.checkpoints.glob("step_*"))


def _split(sources: tuple[Source, ...], blocks: Mapping[str, Any]) -> tuple[list[Path], list[str]]:
    """YAML files, and everything else as `key=value`."""
    files = [Path(one) for one in sources if not isinstance(one, Mapping)]
    trees = [one for one in sources if isinstance(one, Mapping)]
    overrides = [word for tree in (*trees, blocks) for word in _overrides(tree)]
    return files, overrides


def _overrides(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Leaves of a mapping as `key=value`, values as JSON, which is YAML.

    Example:
        >>> list(_overrides({"data": {"train_files": ["a.jsonl"]}, "trainer.seed": 1}))
        ['data.train_files=["a.jsonl"]', 'trainer.seed=1']
    """
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _overrides(value, f"{path}.")
            continue
        try:
            text = json.dumps(value, default=_as_text)
        except TypeError as error:
            fix = "give numbers, text, lists, mappings or paths"
            raise UserError(
                path, repr(value), f"no value of a configuration: {error}", fix
            ) from error
        yield f"{path}={text}"


def _as_text(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as YAML")
