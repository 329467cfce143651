"""Ranks that are lost: how often a run begins again, and from where."""

from types import SimpleNamespace
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.runtime.ray.messages import RanksLost
from luyen.train import start
from luyen.train.start import RankFailures, resume_report, run_with_recovery
from tests.runs import report_of

LOST = RanksLost("rank 1 is gone")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(start, "_RETRY_DELAYS_S", (0.0,))


class Course:
    """Runs that lose their ranks after given steps, one after the other; then one that ends."""

    def __init__(self, folder: Any, *steps: int, asked_to_end: bool = False) -> None:
        self._folder = folder
        self._steps = list(steps)
        self._asked = asked_to_end
        self.modes: list[str] = []

    def prepare(self, report: Any) -> Any:
        self.modes.append(report.config.trainer.resume_mode)
        store = SimpleNamespace(latest=lambda: None)
        directory = SimpleNamespace(events=self._folder / "events")
        return SimpleNamespace(
            step=0,
            interruption=SimpleNamespace(is_wanted=self._asked),
            recorder=SimpleNamespace(store=store, directory=directory),
        )

    def carry_out(self, run: Any) -> Any:
        if not self._steps:
            return "done"
        run.step = self._steps.pop(0)
        raise LOST


def carried(course: Course, report: Any) -> Any:
    return run_with_recovery(report, course.prepare, course.carry_out)


def test_a_run_that_gets_further_each_time_goes_on(tmp_path, capsys: pytest.CaptureFixture[str]):
    course = Course(tmp_path, 1, 2, 3, 4, 5)
    assert carried(course, report_of(tmp_path)) == "done"
    assert capsys.readouterr().err.count("rank 1 is gone (1 of 3 in a row); beginning again") == 5


def test_one_that_never_gets_past_a_step_ends_with_what_to_do(tmp_path):
    """Each time it does steps 3 and 4 again: that is no progress."""
    course = Course(tmp_path, 4, 3, 4)
    with pytest.raises(UserError, match=r"3 times in a row after step 4.*--resume RUN goes on"):
        carried(course, report_of(tmp_path))
    assert len(course.modes) == 3


def test_one_that_was_asked_to_end_does_not_begin_again(tmp_path):
    course = Course(tmp_path, 1, asked_to_end=True)
    with pytest.raises(UserError, match="the run was asked to end"):
        carried(course, report_of(tmp_path))


def test_a_run_that_was_to_begin_anew_goes_on_with_what_it_has(tmp_path):
    course = Course(tmp_path, 1)
    carried(course, report_of(tmp_path, "trainer.resume_mode=disable"))
    assert course.modes == ["disable", "auto"]


def test_one_from_another_run_starts_there_until_it_has_a_checkpoint(tmp_path):
    report = report_of(tmp_path, "trainer.resume_mode=path", "trainer.resume_from_path=/elsewhere")
    again = resume_report(report)
    assert (again.config, again.goes_on) == (report.config, True)


def test_losses_before_the_first_step_count_too():
    losses = RankFailures(most=2)
    losses.note(LOST, step=0)
    with pytest.raises(UserError, match="2 times in a row after step 0"):
        losses.note(LOST, step=0)
