"""Check, train, evaluate and read runs from Python: what the commands do, as functions.

A configuration is given as YAML files, as mappings, or both; later ones win. Keys of a mapping are
nested or dotted: `{"trainer": {"seed": 1}}` is `{"trainer.seed": 1}`.
"""

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from luyen.base.boundary import aside_of_running_loop
from luyen.base.errors import UserError
from luyen.base.process_setup import prepare_process
from luyen.base.rundir import RunDirectory
from luyen.config.check import Report
from luyen.config.check import check as check_files
from luyen.config.loader.load import load
from luyen.config.loader.one_reading import one_reading
from luyen.config.loader.parse import parse
from luyen.config.machine import this_machine
from luyen.config.resume import default_run_name, resume_arguments
from luyen.config.trust import require_trusted_files
from luyen.data.python_rows import is_dataset_dict
from luyen.studio.run_object import Run
from luyen.telemetry.callbacks import Callback
from luyen.train.builders.python_inputs import (
    PythonObjects,
    kept_if_named,
    overrides_of,
    split_callbacks,
)

Source: TypeAlias = str | Path | Mapping[str, Any]
"""A YAML file, or keys and values."""


def check(
    *sources: Source,
    reward: Any = None,
    data: Any = None,
    val_data: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    tools: Any = None,
    **blocks: Any,
) -> Report:
    """Check a configuration as `luyen check` does: every problem at once, and the plan of the run.

    `blocks` are top-level blocks as keyword arguments: `check("a.yaml", trainer={"seed": 1})`.
    Objects are those of `train`; nothing is kept of them.

    Example:
        >>> report = check({"trainer.total_training_steps": 0})
        >>> report.is_sound, "trainer.total_training_steps" in [p.field for p in report.problems]
        (False, True)
    """
    from luyen.data.first_rows import first_row_error

    blocks, objects = _objects(blocks, reward, data, val_data, model, tokenizer, tools)
    files, overrides = _split(sources, blocks)
    with TemporaryDirectory() as folder:
        overrides += overrides_of(objects.write(Path(folder)))
        return check_files(files, overrides, machine=this_machine(), row_error=first_row_error)


@one_reading()
def train(
    *sources: Source,
    reward: Any = None,
    data: Any = None,
    val_data: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    tools: Any = None,
    callbacks: Sequence[Any] = (),
    resume: str | Path | Run | None = None,
    trust: bool = False,
    **blocks: Any,
) -> Run:
    """Train as `luyen train` does, and return the run.

    Objects may take the place of files, and win over what `sources` say:

    - `reward`: a function (`data_source, solution_str, ground_truth, extra_info`, or TRL's
      `completions, **columns`), a list of functions and pairs `(function, weight)`, or names of
      rules;
    - `data`, `val_data`: dicts, an Arrow or pandas table, a `datasets.Dataset`, or names of files;
    - `model`, `tokenizer`: names, or loaded objects of transformers, which stay as they are;
    - `tools`: functions with types and docstrings.

    They are written into the run directory, so that the run is whole. A mapping given as `reward`
    or `data` is that block of the configuration.

    `callbacks` are told of every step (`luyen.Callback`); a `luyen.EarlyStopping` among them sets
    the keys of `trainer.early_stopping`. With `resume` the run there goes on; `sources` may then be
    mappings only. Another user's run that names code is refused unless `trust`. A UserError with
    every problem where the configuration has errors. Ctrl-C, SIGTERM and SIGHUP end the program,
    after the run has saved: KeyboardInterrupt, SystemExit, or a handler of the program.
    """
    blocks, objects = _objects(blocks, reward, data, val_data, model, tokenizer, tools)
    files, overrides = _split(sources, blocks)
    if resume is not None:
        root = resume.root if isinstance(resume, Run) else Path(resume)
        if files:
            why = "the run has its own configuration"
            raise UserError("resume", str(root), why, "give mappings, and no file")
        file, place = resume_arguments(root)
        files, overrides = [file], [*overrides, *place]
    require_trusted_files(files, is_trusted=trust)
    observers, stopping = split_callbacks(callbacks)
    overrides = [*overrides, *overrides_of(stopping)]
    place, named = _place(files, overrides)
    with kept_if_named(place) as folder:
        _train(files, [*overrides, *named, *overrides_of(objects.write(folder))], observers)
    return load_run(place)


def _train(files: Sequence[Path], overrides: Sequence[str], callbacks: Sequence[Callback]) -> None:
    from luyen.sandbox.launch import missing

    report = check_files(files, overrides, machine=this_machine(), missing_promises=missing)
    report.require_sound()
    prepare_process()
    # torch and everything above it load here, after the configuration has been found sound.
    from luyen.train.start import run_training

    with aside_of_running_loop():
        summary = run_training(report, callbacks=callbacks)
    if summary.is_interrupted and summary.signal is not None:
        _deliver_again(summary.signal)


def _deliver_again(number: int) -> None:
    """Let a signal end the program that it was sent to: the run has saved, and has not ended.

    Ctrl-C is a KeyboardInterrupt; a handler of the program is called. Where the program has none,
    SystemExit with the code of shells, so that its own `finally` blocks run.
    """
    if signal.getsignal(number) is signal.SIG_DFL:
        raise SystemExit(128 + number)
    signal.raise_signal(number)


def _place(files: Sequence[Path], overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """The run directory of a configuration, and what gives a run without a name one.

    Two runs without a name are two runs; that without a file is named after the time.
    """
    below = default_run_name(files or [Path("python.yaml")])
    trainer = parse(load(files, overrides, below=below)).config.trainer
    place = Path(trainer.default_local_dir) / trainer.project_name / trainer.experiment_name
    return place.expanduser(), [f"trainer.experiment_name={json.dumps(trainer.experiment_name)}"]


def _objects(
    blocks: Mapping[str, Any],
    reward: Any,
    data: Any,
    val_data: Any,
    model: Any,
    tokenizer: Any,
    tools: Any,
) -> tuple[dict[str, Any], PythonObjects]:
    """The blocks of the configuration, and the objects; a mapping is a block."""
    found = dict(blocks)
    if isinstance(reward, Mapping):
        found["reward"], reward = reward, None
    if isinstance(data, Mapping) and not is_dataset_dict(data):
        found["data"], data = data, None
    given = PythonObjects(
        reward=reward, data=data, val_data=val_data, model=model, tokenizer=tokenizer, tools=tools
    )
    return found, given


@one_reading()
def evaluate(
    model: str | Path | Run, *sources: Source, trust: bool = False, **blocks: Any
) -> dict[str, float]:
    """Measure a checkpoint, a run's newest checkpoint or a Hugging Face model on validation rows.

    `sources` and `blocks` go on top of the run's own configuration; they name rows and reward for a
    model that has none. Another user's run that names code is refused unless `trust`. Returns the
    `val/...` metrics, as a run's own validation reports them.
    """
    prepare_process()
    from luyen.pipeline.policy_loading import EvalOverrides, eval_config, open_checkpoint
    from luyen.studio.evaluation.evaluator import measure

    path = str(model.root if isinstance(model, Run) else model)
    files, overrides = _split(sources, blocks)
    require_trusted_files(files, is_trusted=trust)
    with aside_of_running_loop():
        opened = open_checkpoint(path, overrides, files=files, is_trusted=trust)
        config = eval_config(opened.config, EvalOverrides())
        found = measure(replace(opened, config=config), progress=lambda _done, _total: None)
    return dict(found.metrics)


def load_run(path: str | Path) -> Run:
    """The run in a directory; a UserError where there is none."""
    return Run(root=RunDirectory.open(path).root)


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
