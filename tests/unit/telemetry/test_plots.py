"""Curves are drawn from the metrics file alone, and show what it holds."""

import math
from pathlib import Path

import numpy as np
from matplotlib.image import imread

from luyen.base.files import json_line
from luyen.telemetry.plots import CurvePlot, plot_curves, smoothed


def ink(path: Path, colour: tuple[int, int, int]) -> np.ndarray:
    """(row, column) of the points of a picture that have a colour."""
    pixels = imread(path)[:, :, :3] * 255
    return np.argwhere(np.abs(pixels - colour).max(axis=2) < 12)


def write(path: Path, values: list[float], name: str = "reward/mean") -> Path:
    path.write_text("".join(json_line({"step": i, name: v}) for i, v in enumerate(values)))
    return path


def test_a_rising_reward_rises_in_the_picture(tmp_path: Path):
    metrics = write(tmp_path / "metrics.jsonl", [n / 40 for n in range(40)])
    [picture] = plot_curves(metrics, tmp_path / "report")
    assert picture.name == "reward.png"
    # The legend has the line's colour too: look at the left and the right end of the lower half.
    points = ink(picture, (0x1F, 0x6F, 0x8B))
    assert len(points) > 200
    right = points[points[:, 1] > 800]
    left = points[(points[:, 1] < 200) & (points[:, 0] > 200)]
    assert right[:, 0].max() < left[:, 0].min()
    assert [p.name for p in (tmp_path / "report").iterdir()] == ["reward.png"]


def test_what_the_run_has_is_drawn_and_what_it_lacks_is_not(tmp_path: Path):
    lines = [{"step": 0, "val/accuracy": 0.3}, {"step": 1, "actor/pg_loss": math.nan}]
    lines += [{"step": s, "actor/pg_loss": 1 / s, "reward/mean": 0.1} for s in range(2, 12)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(map(json_line, lines)))
    assert [p.name for p in plot_curves(path, tmp_path)] == ["reward.png", "loss.png"]
    own = CurvePlot(file="mine", title="Mine", metrics=("not/there",))
    assert plot_curves(path, tmp_path, [own]) == []


def test_smoothing_is_the_mean_of_the_last_values():
    assert smoothed([1, 2, 3, 4, 5], 3) == [1, 1.5, 2, 3, 4]
    assert smoothed([math.inf, 2.0], 2)[1] == 2.0
    assert math.isnan(smoothed([math.nan], 3)[0])


def test_a_run_without_a_metrics_file_has_no_curves(tmp_path: Path):
    assert plot_curves(tmp_path / "metrics.jsonl", tmp_path / "report") == []
    assert not (tmp_path / "report").exists()
