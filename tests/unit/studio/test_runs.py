"""The list of runs says of each how far it is, from its files alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from luyen.base.run_lock import claim, is_claimed, release
from luyen.base.rundir import RunDirectory
from luyen.studio.runs import RunFacts, list_runs
from luyen.telemetry.metrics import metrics_line
from luyen.telemetry.summary import note

CONFIG = """\
trainer: {stage: STAGE, total_training_steps: STEPS, total_epochs: 2, best_metric: val/accuracy}
data: {train_batch_size: 4}
"""


def begin(root: Path, name: str, *, stage: str = "rl", steps: str = "3") -> RunDirectory:
    config = CONFIG.replace("STAGE", stage).replace("STEPS", steps)
    manifest = {"rows": {"train": 10}}
    return RunDirectory.create(root / "p" / name, config=config, provenance={}, manifest=manifest)


def facts(root: Path) -> RunFacts:
    [found] = list_runs(root)
    return found


def test_a_run_is_finished_when_its_last_step_is_saved(tmp_path: Path):
    run = begin(tmp_path, "a")
    lines = [{"val/accuracy": 0.25, "val/other": 9.0}, {}, {}, {"reward/mean": 1.0}]
    text = "".join(metrics_line(step, values) for step, values in enumerate(lines))
    run.metrics.write_text(text)
    found = facts(tmp_path)
    assert (found.name, found.stage, found.state) == ("p/a", "rl", "interrupted")
    assert (found.steps, found.total) == (3, 3)
    assert (found.metric, found.value) == ("val/accuracy", 0.25)
    assert found.bytes > len(text)
    run.checkpoint(2).mkdir()
    assert facts(tmp_path).state == "interrupted"
    run.checkpoint(3).mkdir()
    assert facts(tmp_path).state == "finished"


def test_a_run_that_was_stopped_in_its_last_validation_is_interrupted(tmp_path: Path):
    run = begin(tmp_path, "a")
    run.checkpoint(3).mkdir()
    run.metrics.write_text("".join(metrics_line(step, {}) for step in range(3)))
    note(run.root, "interrupted by SIGINT after step 2 of 3")
    found = facts(tmp_path)
    assert (found.state, found.steps) == ("interrupted", 3)
    assert "SIGINT" in found.note
    with run.metrics.open("a") as lines:
        lines.write(metrics_line(3, {"val/accuracy": 0.5}))
    assert (facts(tmp_path).state, facts(tmp_path).note) == ("finished", "")


def test_an_accuracy_is_shown_only_where_every_reward_is_0_or_1(tmp_path: Path):
    run = begin(tmp_path, "a")
    run.metrics.write_text(metrics_line(0, {"val/accuracy": 0.25, "val/reward/mean@2": 0.25}))
    assert (facts(tmp_path).metric, facts(tmp_path).value) == ("val/accuracy", 0.25)
    run.metrics.write_text(metrics_line(0, {"val/accuracy": 0.25, "val/reward/mean@2": 0.4}))
    assert (facts(tmp_path).metric, facts(tmp_path).value) == ("val/reward/mean@2", 0.4)


def test_steps_come_from_epochs_where_no_number_is_given(tmp_path: Path):
    begin(tmp_path, "a", steps="null", stage="sft")
    assert (facts(tmp_path).total, facts(tmp_path).stage) == (5, "sft")
    assert facts(tmp_path).value is None


def test_a_run_that_a_process_has_is_running(tmp_path: Path):
    run = begin(tmp_path, "a")
    code = "import sys; from pathlib import Path; from luyen.base.run_lock import claim\n"
    code += "claim(Path(sys.argv[1])); print('mine', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "mine\n"
        assert facts(tmp_path).state == "running"
        holder.communicate("")
    assert facts(tmp_path).state == "interrupted"


def test_looking_takes_no_claim(tmp_path: Path):
    run = begin(tmp_path, "a").root
    assert not is_claimed(run)
    claim(run)
    assert is_claimed(run)
    release(run)
    assert not is_claimed(run)
    assert not is_claimed(tmp_path / "nowhere")


def test_a_damaged_run_is_listed_with_what_is_wrong(tmp_path: Path):
    run = begin(tmp_path, "a")
    run.config.write_text(run.config.read_text().replace("total_epochs: 2", "total_epochs: 3"))
    found = facts(tmp_path)
    assert found.state == "damaged"
    assert "not as it was written" in found.note
    run.manifest.write_text('{"format": 1')
    assert facts(tmp_path).note.startswith("manifest.json: it is damaged: ")


def test_runs_stand_in_the_order_they_were_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("b", "a"):
        begin(tmp_path, name)
    times = {"b": "2026-01-01T00:00:00+00:00", "a": "2026-01-02T00:00:00+00:00"}
    read = RunDirectory.read_manifest
    monkeypatch.setattr(
        RunDirectory, "read_manifest", lambda run: read(run) | {"created": times[run.root.name]}
    )
    assert [run.name for run in list_runs(tmp_path)] == ["p/b", "p/a"]


def test_listing_loads_no_torch(tmp_path: Path):
    begin(tmp_path, "a")
    code = "import sys\nfrom luyen.cli.main import app\n"
    code += "for words in (['runs'], ['artifacts'], ['artifacts', 'verify']):\n"
    code += "    app([*words, sys.argv[1]], standalone_mode=False)\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True)
