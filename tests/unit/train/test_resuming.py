"""From where a run goes on, and on which basis it takes unfinished work up."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from luyen.base.digests import read_digests
from luyen.base.errors import UserError
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.store import DamagedCheckpoint
from luyen.checkpoint.superseded import SupersededCheckpoints
from luyen.data.sources import load_dataset
from luyen.telemetry.manifest import collect
from luyen.telemetry.summary import last_note
from luyen.train import start
from luyen.train.run import generation_config_hash
from luyen.train.start import prepare_online
from tests.runs import MODEL, ROLLOUT, TURNS, prepare, report_of, train

SAVED = ("trainer.total_training_steps=4", "trainer.save_freq=2")


def test_a_run_that_went_back_goes_on_where_it_went_to(tmp_path: Path):
    root = train(tmp_path, *SAVED).root
    back = f"trainer.resume_from_path={root / 'checkpoints/step_000002'}"
    less = ("trainer.total_training_steps=3", "trainer.max_ckpt_to_keep=1")
    faster = "actor_rollout_ref.actor.optim.lr=1.0e-2"
    with pytest.warns(SupersededCheckpoints, match="left-step_000004"):
        train(tmp_path, "trainer.resume_mode=path", back, *less, faster)
    again = train(tmp_path, *SAVED, faster)
    lines = read_digests(again.root / "digests.jsonl")
    assert [line.step for line in lines] == [1, 2, 3, 4]
    assert all(after.previous == before.chain for before, after in itertools.pairwise(lines))


def test_where_no_checkpoint_is_sound_nothing_begins_anew(tmp_path: Path):
    root = train(tmp_path, *SAVED).root
    before = (root / "digests.jsonl").read_bytes(), (root / "metrics.jsonl").read_bytes()
    for file in root.glob("checkpoints/*/loop.json"):
        file.write_text("{}")
    with (
        pytest.warns(DamagedCheckpoint),
        pytest.raises(UserError, match=r"none of 2 can be used; .*loop\.json"),
    ):
        prepare(tmp_path, *SAVED)
    assert ((root / "digests.jsonl").read_bytes(), (root / "metrics.jsonl").read_bytes()) == before


def test_other_rows_other_code_and_other_keys_are_another_basis(tmp_path: Path):
    config = report_of(tmp_path).config
    facts = collect(seeds={}, datasets={"train": "a"})
    basis = generation_config_hash(config, facts)
    assert basis == generation_config_hash(config, replace(facts, settings={"X": "1"}))
    others = [
        replace(facts, datasets={"train": "b"}),
        replace(facts, code="sha256:0"),
        replace(facts, files={"reward": {"path": "r.py", "fingerprint": "sha256:0"}}),
    ]
    assert basis not in {generation_config_hash(config, other) for other in others}
    warmer = report_of(tmp_path, "actor_rollout_ref.rollout.temperature=0.5").config
    assert generation_config_hash(warmer, facts) != basis


def test_a_row_that_is_judged_otherwise_is_another_row(tmp_path: Path):
    file, found = tmp_path / "rows.jsonl", set[str]()
    for answer in (1, 2):
        row = '{"prompt": [{"role": "user", "content": "q"}], "extra_info": {"k": %d}}\n'
        file.write_text(row % answer)
        rows = load_dataset([str(file)])
        found.add(rows.fingerprint)
    assert len(found) == 2


def test_what_becomes_of_unknown_calls_may_be_decided_late(tmp_path: Path):
    facts = collect(seeds={}, datasets={})
    prints = {
        generation_config_hash(report_of(tmp_path, f"{TURNS}.on_unknown={policy}").config, facts)
        for policy in ("retry", "fault")
    }
    assert len(prints) == 1


def test_a_run_does_not_go_on_as_another_and_is_left_as_it_was(tmp_path: Path):
    root = train(tmp_path, *SAVED).root
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    report = report_of(tmp_path, *SAVED, f"{MODEL}.lora_rank=8", f"{ROLLOUT}.n=8")
    refused = {p.field for p in report.problems if p.severity == "error"}
    assert {f"{MODEL}.lora_rank", f"{ROLLOUT}.n"} <= refused
    with pytest.raises(UserError, match=r"lora_rank 0 -> 8.*rollout\.n 4 -> 8"):
        prepare_online(report)
    after = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert after == before


def test_what_changed_is_listed_where_the_run_went_on(tmp_path: Path):
    train(tmp_path, *SAVED)
    longer = ("trainer.total_training_steps=5", "trainer.save_freq=5")
    run = RunDirectory(train(tmp_path, *longer).root)
    [noted] = run.read_resumptions()
    assert noted["changed"]["config"] == {
        "trainer.total_training_steps": {"before": 4, "now": 5},
        "trainer.save_freq": {"before": 2, "now": 5},
    }
    assert run.read_settings()["trainer"]["total_training_steps"] == 5


def test_rows_that_were_moved_are_the_same_rows(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    row = '{"prompt": [{"role": "user", "content": "%d+1="}], "ground_truth": "2"}\n'
    rows.write_text("".join(row % number for number in range(8)))
    train(tmp_path, *SAVED, f"data.train_files={rows}")
    moved = rows.rename(tmp_path / "moved.jsonl")
    more = ("trainer.total_training_steps=5", f"data.train_files={moved}")
    assert report_of(tmp_path, *SAVED, *more).is_sound
    moved.write_text(moved.read_text() + row % 9)
    problems = report_of(tmp_path, *SAVED, *more).problems
    assert [p.field for p in problems if p.severity == "error"] == ["data.train_files"]


def test_a_run_that_does_not_begin_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise UserError("reward", None, "it cannot be built", "mend it")

    monkeypatch.setattr(start, "build_run", fail)
    with pytest.raises(UserError, match="cannot be built"):
        prepare(tmp_path)
    assert not (tmp_path / "luyen" / "run").exists()


def test_a_run_that_does_not_go_on_keeps_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = RunDirectory(train(tmp_path, *SAVED).root)
    config = run.read_config()

    def fail(*_: object) -> None:
        raise UserError("reward", None, "it cannot be built", "mend it")

    monkeypatch.setattr(start, "build_run", fail)
    with pytest.raises(UserError, match="cannot be built"):
        prepare(tmp_path, *SAVED, "trainer.total_training_steps=9")
    assert (run.read_config(), run.read_resumptions()) == (config, [])
    assert "cannot be built" in last_note(run.root)


def test_metrics_are_kept_whatever_the_loggers_are(tmp_path: Path):
    assert len(train(tmp_path, "trainer.logger=[tensorboard]").metrics) == 2


def test_another_run_begins_with_what_a_run_has_learned(tmp_path: Path):
    root = train(tmp_path, *SAVED).root
    words = (
        "trainer.resume_mode=path",
        f"trainer.resume_from_path={root / 'checkpoints/step_000002'}",
        "trainer.experiment_name=fork",
        "algorithm.adv_estimator=rloo",
        "trainer.total_training_steps=3",
    )
    forked = train(tmp_path, *words)
    assert [line["step"] for line in forked.metrics] == [3]
    bigger = (*words, "trainer.experiment_name=other", f"{MODEL}.lora_rank=4")
    with pytest.raises(UserError, match="it holds other weights than the model"):
        prepare(tmp_path, *bigger)
    assert not (tmp_path / "luyen" / "other").exists()
