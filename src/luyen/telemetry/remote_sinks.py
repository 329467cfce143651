"""Runs on Weights & Biases, MLflow and trackio: metrics of every step, and tables of rollouts.

The packages are imported when a sink is made. `missing_packages` says before what is not there.
"""

import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

from luyen.base.secrets import masked_words
from luyen.telemetry.rollout_tables import COLUMNS, RolloutTable

_STORE = "MLFLOW_TRACKING_URI"
_DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
_REMOTE_STORES = ("http", "https", "databricks", "databricks-uc", "uc")


def _store_scheme() -> str:
    """Scheme of MLflow's store; `sqlite`, its default, where none is named."""
    named = os.environ.get(_STORE, "")
    if not named:
        return "sqlite"
    scheme = named.partition(":")[0].partition("+")[0]
    return scheme if scheme in (*_DATABASES, *_REMOTE_STORES) else "file"


def logger_packages(name: str) -> tuple[str, ...]:
    """Packages that a logger imports: its own, and those of MLflow's tables and databases.

    Example:
        >>> logger_packages("wandb"), logger_packages("console")
        (('wandb',), ())
    """
    if name not in REMOTE:
        return ()
    if name != "mlflow":
        return (name,)
    database = ("sqlalchemy", "alembic") if _store_scheme() in _DATABASES else ()
    return ("mlflow", "pandas", *database)


def missing_packages(
    name: str, installed: Callable[[str], bool] | None = None
) -> tuple[str, str] | None:
    """Reason and fix where a logger lacks a package; None where it has all of them."""
    is_there = installed or (lambda package: importlib.util.find_spec(package) is not None)
    lacking = [package for package in logger_packages(name) if not is_there(package)]
    if not lacking:
        return None
    words = "packages" if len(lacking) > 1 else "package"
    why = f"the {words} {', '.join(lacking)} of the logger {name} cannot be found on this machine"
    fix = f'pip install "luyen[{name}]", or drop it; metrics.jsonl is written anyway'
    return why, fix


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Names and configuration of a run for remote loggers.

    Example:
        >>> RunIdentity(run_id="20250101-000000-abc123", project="luyen", experiment="sums",
        ...             config={"trainer": {"seed": 0}}).experiment
        'sums'
    """

    run_id: str
    """Unique name; a resumed run has the same."""
    project: str
    """Project that groups several runs."""
    experiment: str
    """Display name."""
    config: Mapping[str, Any]
    """The configuration, with secrets masked."""


@final
class WandbSink:
    """A run on Weights & Biases."""

    def __init__(self, identity: RunIdentity, folder: Path) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._table = wandb.Table
        sys.argv = masked_words(sys.argv)  # wandb uploads the command line
        self._run = wandb.init(
            project=identity.project,
            name=identity.experiment,
            id=identity.run_id,
            resume="allow",
            config=dict(identity.config),
            dir=str(folder),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the step."""
        self._run.log(dict(metrics), step=step)

    def rollouts(self, table: RolloutTable) -> None:
        """Log the table with the metrics of its step."""
        rows = [list(row) for row in table.rows]
        shown = self._table(columns=list(COLUMNS), data=rows)
        self._run.log({table.name: shown}, step=table.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


@final
class MlflowSink:
    """A run in the store that MLFLOW_TRACKING_URI names; by default `sqlite:///mlflow.db`."""

    def __init__(self, identity: RunIdentity, folder: Path) -> None:  # noqa: ARG002 - one signature
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        self._metric = Metric
        self._is_file_store = _store_scheme() == "file"
        self._client = MlflowClient()
        found = self._client.get_experiment_by_name(identity.project)
        where = found.experiment_id if found else self._client.create_experiment(identity.project)
        earlier = self._client.search_runs([where], f"tags.`luyen.run_id` = '{identity.run_id}'")
        if earlier:
            self._id = earlier[0].info.run_id
            return
        tags = {"luyen.run_id": identity.run_id, "mlflow.runName": identity.experiment}
        self._id = self._client.create_run(where, tags=tags).info.run_id
        params = [Param(name, str(value)[:500]) for name, value in _leaves(identity.config)]
        for start in range(0, len(params), 100):  # the most that one request may carry
            self._client.log_batch(self._id, params=params[start : start + 100])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the step; characters that MLflow does not allow in a name become `_`."""
        now = int(time.time() * 1000)
        named = {self._name(name): value for name, value in metrics.items()}
        rows = [self._metric(name, value, now, step) for name, value in named.items()]
        self._client.log_batch(self._id, metrics=rows)

    def rollouts(self, table: RolloutTable) -> None:
        """Store the table as a file of the run, which MLflow shows and `load_table` reads."""
        place = f"{table.name}/step_{table.step:06d}.json"
        self._client.log_table(self._id, table.columns(), place)

    def _name(self, metric: str) -> str:
        """The name in MLflow. In a store of files a slash is a folder, and `time/reward` next to
        `time/reward/right` would be a file and a folder: there it is a dot."""
        allowed = re.sub(r"[^\w./: -]", "_", metric)
        return allowed.replace("/", ".") if self._is_file_store else allowed

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

    def __init__(self, identity: RunIdentity, folder: Path) -> None:  # noqa: ARG002 - one signature
        import trackio  # pyright: ignore[reportMissingImports]

        self._table = trackio.Table
        self._run = trackio.init(
            project=identity.project,
            name=f"{identity.experiment}-{identity.run_id}",
            config=dict(identity.config),
            resume="allow",
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the step."""
        self._run.log(dict(metrics), step=step)

    def rollouts(self, table: RolloutTable) -> None:
        """Log the table."""
        rows = [list(row) for row in table.rows]
        shown = self._table(columns=list(COLUMNS), data=rows)
        self._run.log({table.name: shown}, step=table.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


RemoteSink: TypeAlias = WandbSink | MlflowSink | TrackioSink
REMOTE: dict[str, Callable[[RunIdentity, Path], RemoteSink]] = {
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "trackio": TrackioSink,
}
"""Sinks that need a package of their own."""
