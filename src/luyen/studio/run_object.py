"""A run as an object: configuration, metrics and rollouts as tables, curves in a notebook."""

import base64
import html
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from luyen.base.errors import UserError, did_you_mean
from luyen.base.files import write_whole
from luyen.base.rundir import RunDirectory, step_of
from luyen.studio.runs import RunFacts, run_facts
from luyen.telemetry.metrics import read_metrics, series

if TYPE_CHECKING:
    import pyarrow as pa

_SHOWN_ROWS = 20
_SHOWN_COLUMNS = ("reward/mean", "val/accuracy", "actor/loss", "sft/nll", "preference/accuracy")
_CURVES = ("reward/mean", "val/accuracy", "sft/nll", "sft/val_nll", "preference/accuracy")


@final
class MetricTable(list[dict[str, float]]):
    """Rows of metrics: a list of dicts that is also an Arrow or a pandas table.

    Example:
        >>> table = MetricTable([{"step": 1, "reward/mean": 0.5}, {"step": 2}])
        >>> table[-1]["step"], table.column("reward/mean"), table.to_arrow().num_rows
        (2, [0.5, None], 2)
    """

    @property
    def names(self) -> list[str]:
        """Columns, in the order in which rows have them."""
        return list(dict.fromkeys(name for row in self for name in row))

    def column(self, name: str) -> list[float | None]:
        """Values of a metric, None where a row has none; a UserError for a name of no row."""
        if name not in self.names:
            fix = did_you_mean(name, self.names)
            raise UserError("metric", name, "no step of the run has it", fix)
        return [row.get(name) for row in self]

    def to_arrow(self) -> "pa.Table":
        """The rows as an Arrow table; what a row lacks is null."""
        arrow: Any = importlib.import_module("pyarrow")
        return arrow.table({name: self.column(name) for name in self.names})

    def to_pandas(self) -> Any:
        """The rows as a pandas table; a UserError where pandas is not installed."""
        try:
            importlib.import_module("pandas")
        except ImportError as error:
            fix = "pip install pandas, or take to_arrow()"
            raise UserError("table", "pandas", "it is not installed", fix) from error
        return self.to_arrow().to_pandas()

    def _repr_html_(self) -> str:
        """What a notebook shows: the newest rows and the main columns."""
        main = [name for name in ("step", *_SHOWN_COLUMNS) if name in self.names]
        names = main if len(main) > 1 else self.names[:6]
        rows = [[_text(row.get(name)) for name in names] for row in self[-_SHOWN_ROWS:]]
        more = f"{len(self)} rows, {len(self.names)} columns"
        return f"{_html_table(names, rows)}<p>{more}</p>"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A picture of metrics over the steps; a notebook shows it.

    Example:
        >>> Plot(png=b"...").png
        b'...'
    """

    png: bytes = field(repr=False)
    """The picture."""

    def save(self, path: str | Path) -> Path:
        """Write the picture to a file."""
        place = Path(path).expanduser()
        write_whole(place, self.png)
        return place

    def _repr_png_(self) -> bytes:
        return self.png


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

    def metrics(self) -> MetricTable:
        """One row per step: its number under `step`, and every metric."""
        if not self.directory.metrics.is_file():
            return MetricTable()
        lines = read_metrics(self.directory.metrics)
        return MetricTable({"step": line.step, **line.values} for line in lines)

    def validation(self) -> MetricTable:
        """The validations of the run: their steps, and the metrics that they measured."""
        rows = [
            {name: value for name, value in row.items() if name == "step" or _is_validation(name)}
            for row in self.metrics()
        ]
        return MetricTable(row for row in rows if len(row) > 1)

    def rollouts(
        self, step: int | None = None, split: Literal["train", "validation"] = "train"
    ) -> "pa.Table":
        """Rollouts as an Arrow table, of a step or of all; `.to_pandas()` with pandas.

        `split` says whether those of training or of validations are meant.
        """
        from luyen.telemetry.rollout_files import read_table

        is_validation = split == "validation"
        if step is not None:
            return read_table(self.directory.rollouts(step, validation=is_validation))
        folder = self.directory.rollouts(0, validation=is_validation).parent
        found = [read_table(path) for path in sorted(folder.glob("step_*.parquet"))]
        if not found:
            why = f"the run has written no rollouts of {split}"
            raise UserError("split", split, why, "choose the other one, or a run of the stage rl")
        arrow: Any = importlib.import_module("pyarrow")
        plain = [table.replace_schema_metadata(None) for table in found]
        return arrow.concat_tables(plain, promote_options="default")

    def checkpoints(self) -> list[Path]:
        """Checkpoint folders, the oldest first."""
        folder = self.directory.checkpoints
        return sorted(path for path in folder.glob("step_*") if step_of(path.name) is not None)

    def plot(self, *metrics: str) -> Plot:
        """Metrics over the steps as a picture, which a notebook shows; `.save(path)` writes it.

        Without names it shows the reward or the loss of the stage. A UserError names a metric that
        the run does not have.
        """
        from luyen.telemetry.plots import curve_picture

        table = self.metrics()
        chosen = metrics or tuple(name for name in _CURVES if name in table.names)
        for name in chosen:
            table.column(name)
        if not chosen:
            raise UserError("metric", None, "the run has written no metrics", "train a step")
        lines = read_metrics(self.directory.metrics)
        points = {name: series(lines, name) for name in chosen}
        return Plot(png=curve_picture(self.root.name, points))

    def _repr_html_(self) -> str:
        """What a notebook shows: state, steps and the main curves."""
        facts = self.facts
        steps = f"{facts.steps} of {facts.total}" if facts.total is not None else str(facts.steps)
        said = {"run": str(self.root), "state": facts.state, "stage": facts.stage, "steps": steps}
        said |= {facts.metric: _text(facts.value)} if facts.metric is not None else {}
        said |= {"note": facts.note} if facts.note else {}
        table = _html_table(["", ""], [[name, value] for name, value in said.items()])
        if not any(name in self.metrics().names for name in _CURVES):
            return table
        picture = base64.b64encode(self.plot().png).decode()
        return f'{table}<img src="data:image/png;base64,{picture}" style="max-width: 640px">'


def _is_validation(name: str) -> bool:
    return name.startswith("val/") or "/val_" in name


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _html_table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def cells(kind: str, values: Iterable[str]) -> Iterator[str]:
        return (f"<{kind}>{html.escape(value)}</{kind}>" for value in values)

    body = "".join(f"<tr>{''.join(cells('td', row))}</tr>" for row in rows)
    return f"<table><tr>{''.join(cells('th', names))}</tr>{body}</table>"
