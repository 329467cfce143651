"""From where a run goes on, and on which basis it takes unfinished work up."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from luyen.base.digests import read_digests
from luyen.base.errors import UserError
from luyen.checkpoint.courses import LeftBehind
from luyen.checkpoint.store import DamagedCheckpoint
from luyen.data.sources import load_dataset
from luyen.telemetry.manifest import collect
from luyen.train.work import settings_print
from tests.runs import TURNS, prepare, report_of, train

SAVED = ("trainer.total_training_steps=4", "trainer.save_freq=2")


def test_a_run_that_went_back_goes_on_where_it_went_to(tmp_path: Path):
    root = train(tmp_path, *SAVED).root
    back = f"trainer.resume_from_path={root / 'checkpoints/step_000002'}"
    less = ("trainer.total_training_steps=3", "trainer.max_ckpt_to_keep=1")
    faster = "actor_rollout_ref.actor.optim.lr=1.0e-2"
    with pytest.warns(LeftBehind, match="left-step_000004"):
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
    basis = settings_print(config, facts)
    assert basis == settings_print(config, replace(facts, settings={"X": "1"}))
    others = [
        replace(facts, datasets={"train": "b"}),
        replace(facts, code="sha256:0"),
        replace(facts, files={"reward": {"path": "r.py", "fingerprint": "sha256:0"}}),
    ]
    assert basis not in {settings_print(config, other) for other in others}
    warmer = report_of(tmp_path, "actor_rollout_ref.rollout.temperature=0.5").config
    assert settings_print(warmer, facts) != basis


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
        settings_print(report_of(tmp_path, f"{TURNS}.on_unknown={policy}").config, facts)
        for policy in ("retry", "fault")
    }
    assert len(prints) == 1
