"""The places metrics go, and the only door for wandb, mlflow and trackio.

Local sinks raise when they cannot write: a run that records nothing should not go on. Remote ones
are made and called in the background (`BackgroundSink`), and import their packages only there.
"""

import importlib.util
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.files import append, writing
from luyen.base.owned import open_lines
from luyen.base.rundir import RunDirectory
from luyen.base.secrets import masked_words
from luyen.telemetry.background import BackgroundSink, Sink
from luyen.telemetry.catalog import CATALOG
from luyen.telemetry.display import Display
from luyen.telemetry.metrics_file import keep_before, metrics_line
from luyen.telemetry.spans import SPANS
from luyen.telemetry.tfevents import EventFile


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """How a run is called where other runs are.

    Example:
        >>> RunIdentity(run_id="20250101-000000-abc123", project="luyen", experiment="sums",
        ...             config={"trainer": {"seed": 0}}).experiment
        'sums'
    """

    run_id: str
    """Unique name; a resumed run has the same."""
    project: str
    """Runs that belong together."""
    experiment: str
    """Name for people."""
    config: Mapping[str, Any]
    """The configuration, without what is secret in it: remote loggers get it."""


@final
class ConsoleSink:
    """Shows each step on the display."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the step."""
        self._display.step(step, metrics)

    def artifact(self, path: Path) -> None:
        """A display keeps no files."""

    def close(self) -> None:
        """The display is closed by whoever opened it."""


@final
class JsonlSink:
    """`metrics.jsonl`: one object a step with sorted keys and a checksum, in one write."""

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        """Steps from `first_step` on will be measured again: their lines are dropped."""
        keep_before(path, first_step)
        with writing(path):
            self._file = open_lines(path)
        self._last = -1

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of a step."""
        assert step > self._last, f"step {step} was written after step {self._last}"
        own = {"step", "check"} & metrics.keys()
        assert not own, f"{own} are entries of the line, not of a metric"
        self._last = step
        append(self._file, metrics_line(step, metrics).encode())

    def artifact(self, path: Path) -> None:
        """The run directory holds the file already."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@final
class TensorBoardSink:
    """Event files for TensorBoard."""

    def __init__(self, folder: Path, *, first_step: int = 0) -> None:
        self._file = EventFile(folder, first_step=first_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the scalars of a step."""
        self._file.write(step, metrics)

    def artifact(self, path: Path) -> None:
        """The run directory holds the file already."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@final
class WandbSink:
    """A run on Weights & Biases."""

    def __init__(self, who: RunIdentity, folder: Path) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        sys.argv = masked_words(sys.argv)  # it reads and sends the command line by itself
        self._run = wandb.init(
            project=who.project,
            name=who.experiment,
            id=who.run_id,
            resume="allow",
            config=dict(who.config),
            dir=str(folder),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the step."""
        self._run.log(dict(metrics), step=step)

    def artifact(self, path: Path) -> None:
        """Upload the file."""
        self._run.save(str(path), base_path=str(path.parent), policy="now")

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


@final
class MlflowSink:
    """A run on an MLflow server, or in the store that MLFLOW_TRACKING_URI names."""

    def __init__(self, who: RunIdentity, folder: Path) -> None:  # noqa: ARG002 - one signature
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        self._metric = Metric
        self._client = MlflowClient()
        found = self._client.get_experiment_by_name(who.project)
        where = found.experiment_id if found else self._client.create_experiment(who.project)
        earlier = self._client.search_runs([where], f"tags.`luyen.run_id` = '{who.run_id}'")
        if earlier:
            self._id = earlier[0].info.run_id
            return
        tags = {"luyen.run_id": who.run_id, "mlflow.runName": who.experiment}
        self._id = self._client.create_run(where, tags=tags).info.run_id
        params = [Param(name, str(value)[:500]) for name, value in _leaves(who.config)]
        for start in range(0, len(params), 100):  # the most that one request may carry
            self._client.log_batch(self._id, params=params[start : start + 100])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the step; characters that MLflow refuses in a name become `_`."""
        now = int(time.time() * 1000)
        named = {re.sub(r"[^\w./: -]", "_", name): value for name, value in metrics.items()}
        rows = [self._metric(name, value, now, step) for name, value in named.items()]
        self._client.log_batch(self._id, metrics=rows)

    def artifact(self, path: Path) -> None:
        """Upload the file."""
        self._client.log_artifact(self._id, str(path))

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


def _leaves(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


@final
class TrackioSink:
    """A run in trackio's local store."""

    def __init__(self, who: RunIdentity, folder: Path) -> None:  # noqa: ARG002 - one signature
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(
            project=who.project,
            name=f"{who.experiment}-{who.run_id}",
            config=dict(who.config),
            resume="allow",
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the step."""
        self._run.log(dict(metrics), step=step)

    def artifact(self, path: Path) -> None:
        """Trackio keeps numbers; the run directory holds the file."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


REMOTE: dict[str, Callable[[RunIdentity, Path], Sink]] = {
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "trackio": TrackioSink,
}
"""Sinks that need a package of their own."""


@final
class MetricLog:
    """All sinks of a run as one: checks names against the catalog, adds the times of the step."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send what a step measured to every sink."""
        whole = SPANS.drain(step) | {name: float(value) for name, value in metrics.items()}
        CATALOG.warn_of_missing(whole)
        for sink in self._sinks:
            sink.write(step, whole)

    def artifact(self, path: Path) -> None:
        """Send a finished file to the sinks that keep files."""
        for sink in self._sinks:
            sink.artifact(path)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def open_sinks(
    names: Sequence[str],
    *,
    directory: RunDirectory,
    who: RunIdentity,
    display: Display,
    first_step: int = 0,
) -> MetricLog:
    """`metrics.jsonl`, and the sinks that `trainer.logger` adds.

    `first_step` is the first that this session will write.
    """
    local: dict[str, Callable[[], Sink]] = {
        "console": lambda: ConsoleSink(display),
        "tensorboard": lambda: TensorBoardSink(directory.tensorboard, first_step=first_step),
    }
    remote = [name for name in names if name not in (*local, "jsonl")]
    for name in remote:  # before any file is opened
        assert name in REMOTE, f"`{name}` passed the check of trainer.logger"
        if importlib.util.find_spec(name) is None:
            why = f"the package {name} is not installed"
            raise UserError("trainer.logger", name, why, f"pip install {name}, or drop it")
    sinks: list[Sink] = [JsonlSink(directory.metrics, first_step=first_step)]
    sinks += [local[name]() for name in names if name in local]
    sinks += [BackgroundSink(name, partial(REMOTE[name], who, directory.root)) for name in remote]
    return MetricLog(sinks)
