"""Early stopping and callbacks: when a run is to end, and that a callback cannot harm it."""

from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.telemetry.callbacks import Callback, RunCallbacks, Stop, TrainingProgress
from luyen.telemetry.early_stopping import EarlyStopping, Stagnation
from luyen.telemetry.metrics import StepMetrics
from luyen.telemetry.summary import last_note


def stops_after(rule: EarlyStopping, values: list[float]) -> int | None:
    seen = Stagnation()
    for step, value in enumerate(values, 1):
        seen = seen.after(rule, step, {"m": value, "other": 1.0})
        if seen.reason(rule) is not None:
            return step
    return None


@pytest.mark.parametrize(
    ("rule", "values", "step"),
    [
        (EarlyStopping(metric="m", patience=2), [1.0, 2.0, 2.0, 1.5], 4),
        (EarlyStopping(metric="m", patience=2), [1.0, 2.0, 2.0, 2.1, 2.1], None),
        (EarlyStopping(metric="m", patience=1, mode="min"), [2.0, 1.0, 1.5], 3),
        (EarlyStopping(metric="m", patience=2, minimum_change=0.5), [1.0, 1.4, 1.5], 3),
        (EarlyStopping(metric="m", patience=2, minimum_change=0.5), [1.0, 1.4, 1.6], None),
        (EarlyStopping(metric="m", patience=2), [float("nan"), float("nan")], 2),
        (EarlyStopping(metric="m", patience=2), [float("nan"), 1.0, float("nan")], None),
        (EarlyStopping(metric="no", patience=1), [1.0, 1.0, 1.0], None),
    ],
)
def test_a_run_stops_after_so_many_values_without_an_improvement(
    rule: EarlyStopping, values: list[float], step: int | None
):
    assert stops_after(rule, values) == step


def test_a_session_that_goes_on_knows_what_the_record_says(tmp_path: Path):
    rule = EarlyStopping(metric="m", patience=2)
    lines = [StepMetrics(step=s, values={"m": v}) for s, v in ((1, 2.0), (2, 1.0))]
    callbacks = RunCallbacks(tmp_path, rule)
    callbacks.start(2, 9, lines)
    assert callbacks.reason is None
    callbacks.recorded(3, 9, {"m": 1.5}, {})
    assert callbacks.reason == "m has not risen above 2 (step 1) in 2 measurements"
    again = RunCallbacks(tmp_path, rule)
    again.start(3, 9, [*lines, StepMetrics(step=3, values={"m": 1.5})])
    assert again.reason == callbacks.reason


def test_a_metric_that_nothing_measures_is_noted_once(tmp_path: Path):
    for metric, lines, said in (
        ("val/acuracy", [({"a": 1.0}, {}), ({"val/accuracy": 1.0}, {"val/accuracy": 1.0})], True),
        ("val/accuracy", [({"a": 1.0}, {}), ({"val/accuracy": 1.0}, {"val/accuracy": 1.0})], False),
        ("reward/maen", [({"reward/mean": 1.0}, {})] * 2, True),
    ):
        run = tmp_path / metric
        run.mkdir(parents=True)
        callbacks = RunCallbacks(run, EarlyStopping(metric=metric))
        callbacks.start(0, 9, [])
        for step, (metrics, validation) in enumerate(lines, 1):
            callbacks.recorded(step, 9, metrics, validation)
        assert (f"nothing measured {metric}" in last_note(run)) is said


class Ender(Callback):
    """Asks for the end after every step, and keeps what it is told at the end."""

    reason: str | None = "not told"

    def on_step(self, progress: TrainingProgress, metrics: Mapping[str, float]) -> Stop:
        del metrics
        return Stop(reason=f"step {progress.step}")

    def on_end(self, progress: TrainingProgress, reason: str | None) -> None:
        del progress
        self.reason = reason


@pytest.mark.parametrize(("total", "reason"), [(2, "step 1"), (1, None)])
def test_a_run_that_made_its_last_step_did_not_end_early(
    tmp_path: Path, total: int, reason: str | None
):
    callbacks, ender = RunCallbacks(tmp_path, None), Ender()
    callbacks.use([ender])
    callbacks.start(0, total, [])
    callbacks.recorded(1, total, {"m": 1.0}, {})
    callbacks.end(1, total)
    assert ender.reason == reason


class Careless(Callback):
    """Does what a callback should not."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_step(self, progress: TrainingProgress, metrics: Mapping[str, float]) -> Stop | None:
        self.told.append(progress.step)
        if progress.step == 1:
            metrics["m"] = 3.0  # pyright: ignore[reportIndexIssue]
        return Stop(reason="enough") if progress.step == 3 else None

    def on_validation(self, progress: TrainingProgress, metrics: Mapping[str, float]) -> None:
        progress.step = 5  # pyright: ignore[reportAttributeAccessIssue]

    def on_end(self, progress: TrainingProgress, reason: str | None) -> None:
        self.told.append(reason)
        raise SystemExit(3)


@pytest.mark.parametrize("reason", [None, "", " ", 3])
def test_a_stop_says_why(reason: Any):
    with pytest.raises(UserError, match=r"Stop\.reason"):
        Stop(reason=reason)


class Odd(Callback):
    """Gives what is no answer, and then a reason that holds a password."""

    def on_step(self, progress: TrainingProgress, metrics: Mapping[str, float]) -> Any:
        return True if progress.step == 1 else Stop(reason=f"see https://me:pw@host {'x' * 9000}")


def test_an_answer_that_is_none_is_noted_and_a_reason_is_masked(tmp_path: Path):
    callbacks = RunCallbacks(tmp_path, None)
    callbacks.use([Odd()])
    callbacks.recorded(1, 4, {"m": 1.0}, {})
    assert "Odd.on_step failed: TypeError: it returned a bool" in last_note(tmp_path)
    assert callbacks.reason is None
    callbacks.recorded(2, 4, {"m": 1.0}, {})
    assert callbacks.reason is not None
    assert callbacks.reason.startswith("see https://***@host x")
    assert len(callbacks.reason) == 500


def test_a_callback_cannot_harm_the_run(tmp_path: Path):
    one, two = Careless(), Careless()
    callbacks = RunCallbacks(tmp_path, None)
    callbacks.use([one, two])
    metrics = {"m": 1.0}
    callbacks.start(0, 4, [])
    callbacks.recorded(0, 4, metrics, metrics)
    callbacks.recorded(1, 4, metrics, {})
    assert metrics == {"m": 1.0}
    assert "Careless.on_step failed: TypeError" in last_note(tmp_path)
    callbacks.recorded(2, 4, metrics, {})
    assert callbacks.reason is None
    callbacks.recorded(3, 4, metrics, {})
    callbacks.end(3, 4)
    assert callbacks.reason == "enough"
    assert one.told == two.told == [1, 2, 3, "enough"]
    notes = (tmp_path / "notes.jsonl").read_text()
    assert FrozenInstanceError.__name__ in notes
    assert notes.count("Careless.on_step") == 1
