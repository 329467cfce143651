"""The last words of a run are what it was told."""

from pathlib import Path

from luyen.telemetry.summary import Change, RunSummary


def test_the_summary_says_what_changed_where_files_are_and_what_to_try():
    text = RunSummary(
        headline="Finished",
        changes=(
            Change(label="validation accuracy", before=0.375, after=0.953),
            Change(label="reward", before=None, after=0.9),
        ),
        steps=40,
        seconds=88.0,
        files={"curve": Path("r/report/reward.png"), "checkpoint": Path("r/checkpoints/step_40")},
        commands=("luyen chat r/checkpoints/step_40",),
    ).text()
    assert text.splitlines() == [
        "Finished: 40 steps in 1m28s (2.20 s a step)",
        "  validation accuracy 0.375 -> 0.953 (+0.578)",
        "  reward 0.900 at the end",
        "",
        "Files",
        "  curve       r/report/reward.png",
        "  checkpoint  r/checkpoints/step_40",
        "",
        "Try next",
        "  luyen chat r/checkpoints/step_40",
    ]


def test_an_interrupted_run_divides_by_no_step():
    bare = RunSummary(headline="Interrupted", changes=(), steps=0, seconds=0.4, files={})
    assert bare.text() == "Interrupted: 0 steps in 0s"


def test_what_was_not_measured_is_said():
    assert Change(label="reward", before=0.5, after=None).words() == (
        "reward 0.500 before the first step"
    )
    assert Change(label="reward", before=None, after=None).words() == "reward was not measured"
    assert (
        Change(label="reward", before=0.5, after=0.25).words() == "reward 0.500 -> 0.250 (-0.250)"
    )
