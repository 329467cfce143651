"""Reward and loss over the steps, as pictures. The only place that imports matplotlib."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from luyen.base.files import write_whole, writing
from luyen.telemetry.metrics import read_metrics, series


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePlot:
    """One picture: some metrics over the steps.

    Example:
        >>> CurvePlot(file="reward", title="Reward", metrics=("reward/mean",)).file
        'reward'
    """

    file: str
    """Name of the picture without its ending."""
    title: str
    """Heading, and label of the vertical axis."""
    metrics: tuple[str, ...]
    """Metrics to plot; those the run does not have are left out."""


CURVES = (
    CurvePlot(
        file="reward",
        title="Reward",
        metrics=("reward/mean", "val/accuracy", "val/reward/mean"),
    ),
    CurvePlot(file="loss", title="Loss", metrics=("actor/loss", "actor/pg_loss", "critic/vf_loss")),
)
"""Plots that a run writes at its end."""

_COLOURS = ("#1f6f8b", "#c8553d", "#588b3a", "#7a5195")


def plot_curves(metrics: Path, folder: Path, curves: Sequence[CurvePlot] = CURVES) -> list[Path]:
    """Plot every curve that the metrics file has points for; returns the paths of the images.

    Without a metrics file nothing is plotted.
    """
    if not metrics.is_file():
        return []
    steps = read_metrics(metrics)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    plots: list[Path] = []
    for curve in curves:
        lines = {name: series(steps, name) for name in curve.metrics}
        lines = {name: points for name, points in lines.items() if points[0]}
        if lines:
            path = folder / f"{curve.file}.png"
            write_whole(path, curve_picture(f"{curve.title} over the steps", lines, curve.title))
            plots.append(path)
    return plots


def curve_picture(
    title: str, lines: Mapping[str, tuple[list[int], list[float]]], label: str = ""
) -> bytes:
    """A PNG of some curves, each its steps and values; `label` is that of the vertical axis."""
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for (name, (steps, values)), colour in zip(lines.items(), _COLOURS * 3, strict=False):
        _plot_line(axes, name, steps, values, colour)
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_xlabel("step")
    axes.set_ylabel(label.lower())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    picture = io.BytesIO()
    canvas.print_png(picture)
    return picture.getvalue()


def _plot_line(axes: Axes, name: str, steps: list[int], values: list[float], colour: str) -> None:
    """Plot a few points as they are; many get a pale line with a moving average over it."""
    if len(steps) < 8:
        axes.plot(steps, values, "o-", color=colour, linewidth=2, markersize=4, label=name)
        return
    axes.plot(steps, values, color=colour, linewidth=1, alpha=0.3)
    window = max(3, len(values) // 15)
    smooth = smoothed(values, window)
    axes.plot(steps, smooth, color=colour, linewidth=2, label=f"{name} (mean of {window} steps)")


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Trailing moving average over at most `window` values; non-finite values are skipped.

    Example:
        >>> smoothed([1.0, 3.0, float("nan"), 5.0], 2)
        [1.0, 2.0, 3.0, 5.0]
    """
    means: list[float] = []
    for end in range(1, len(values) + 1):
        near = [v for v in values[max(0, end - window) : end] if math.isfinite(v)]
        means.append(math.fsum(near) / len(near) if near else math.nan)
    return means
