"""Profiled steps leave a trace with the phases of the loop; other steps leave nothing."""

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from luyen.base.errors import UserError
from luyen.cli.main import app
from luyen.train.loop import train_online
from luyen.train.run import OnlineRun
from luyen.train.start import run_training
from tests.e2e.key_cases import CRITIC
from tests.runs import TINY, close, prepare, report_of, train

PHASES = {"generate", "score", "log-probs", "update", "update actor"}


def names(trace: Path) -> set[str]:
    """Names of everything in a trace."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return {event["name"] for event in events if "name" in event}


def test_the_steps_that_were_asked_for_are_traced(tmp_path: Path):
    words = ("trainer.total_training_steps=3", "trainer.profile.steps=[2, 3]")
    done = train(tmp_path, *words)
    folder = done.root / "profile"
    found = sorted(path.name for path in folder.iterdir())
    assert found == [
        "operators_step_000002.txt",
        "operators_step_000003.txt",
        "trace_step_000002.json.gz",
        "trace_step_000003.json.gz",
    ]
    assert names(folder / "trace_step_000002.json.gz") >= PHASES
    assert "aten::" in (folder / "operators_step_000003.txt").read_text()


def test_the_critic_has_a_stretch_of_its_own(tmp_path: Path):
    done = train(tmp_path / "runs", *CRITIC, "trainer.profile.steps=[1]",
                 f"trainer.profile.save_path={tmp_path / 'traces'}")  # fmt: skip
    assert names(tmp_path / "traces" / "trace_step_000001.json.gz") >= {*PHASES, "update critic"}
    assert not (done.root / "profile").exists()


def test_a_run_that_is_profiled_learns_the_same(tmp_path: Path):
    plain = train(tmp_path / "plain")
    profiled = train(tmp_path / "profiled", "trainer.profile.steps=[1]")
    assert profiled.metrics == plain.metrics


def test_without_steps_nothing_is_made(tmp_path: Path):
    run: OnlineRun = prepare(tmp_path)
    with run.profiler.step(1), run.profiler.part("generate"):
        assert not run.profiler._here.is_on
    close(run)
    assert not run.profiler.folder.exists()


def test_an_error_inside_a_profiled_step_is_the_error_that_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = prepare(tmp_path, "trainer.profile.steps=[1]")
    monkeypatch.setattr(OnlineRun, "submit_ahead", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        train_online(run)
    close(run)


def test_the_command_keeps_traces_and_nothing_else(tmp_path: Path):
    out, runs = tmp_path / "traces", tmp_path / "runs"
    words = [*TINY, f"trainer.default_local_dir={runs}", "--steps", "2", "--out", str(out)]
    config = tmp_path / "config.yaml"
    config.write_text("trainer:\n  seed: 1\n")
    found = CliRunner().invoke(app, ["profile", str(config), *words], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    assert "Heaviest operators of step 2" in found.output
    assert names(out / "trace_step_000002.json.gz") >= PHASES
    assert not runs.exists()


def test_the_command_leaves_the_course_of_the_run_as_it_is(tmp_path: Path):
    out = tmp_path / "traces"
    words = [*TINY, "actor_rollout_ref.actor.optim.lr_warmup_steps=5", "--out", str(out)]
    long = [*words, "trainer.total_training_steps=50", "--steps", "2"]
    found = CliRunner().invoke(app, ["profile", *long], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    assert len(list(out.iterdir())) == 2
    late = [*words[:-1], str(tmp_path / "none"), "trainer.total_training_steps=6", "--steps", "9"]
    with pytest.raises(UserError, match="the run was over"):
        CliRunner().invoke(app, ["profile", *late], catch_exceptions=False)


def test_steps_that_are_none_are_refused(tmp_path: Path):
    found = CliRunner().invoke(app, ["profile", "--steps", "0"])
    assert found.exit_code == 1
    report = report_of(tmp_path, "trainer.profile.steps=[0]")
    assert "S16" in {problem.id for problem in report.problems}


def test_supervised_steps_are_traced_too(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    rows.write_text("\n".join(json.dumps({"messages": talk}) for _ in range(8)))
    words = (
        "trainer.stage=sft",
        f"data.train_files={rows}",
        "data.filter_duplicates=false",
        f"trainer.profile.save_path={tmp_path / 'traces'}",
        "trainer.profile.steps=[1]",
        "reward.custom_reward_function.path=null",
    )
    report = report_of(tmp_path / "runs", *words)
    assert report.is_sound, report.problems
    run_training(report, trial_steps=1)
    assert "update actor" in names(tmp_path / "traces" / "trace_step_000001.json.gz")
    assert not list((tmp_path / "runs").rglob("step_*"))
