"""Offline stages as a user runs them: recipes, held-out accuracy, resuming, replay."""

import json
import shutil
from pathlib import Path

import pytest

from luyen.base.digests import read_digests
from luyen.base.errors import UserError
from luyen.checkpoint.store import CheckpointStore
from luyen.config.check import check
from luyen.telemetry.metrics import read_metrics
from luyen.train.session import ChangedRows
from luyen.train.start import run_training
from tests.e2e.recipes import OFFLINE, RECIPES
from tests.e2e.tiny import luyen
from tests.runs import MODEL

SMALL = ("data.train_batch_size=4", "data.train_max_samples=24", "data.val_max_samples=8")
QUIET = ("trainer.logger=[jsonl]", "trainer.save_freq=2")
WARM = "actor_rollout_ref.actor.optim.lr_warmup_steps=1"
SLOW = {"builtin_arithmetic", "builtin_tools"}
"""Recipes that read a hundred thousand rows."""
LEARN = {"kto": 0.8}
"""Accuracy that is asked of marked answers; pairs must reach 0.9."""


def run(name: str, folder: Path, *more: str) -> Path:
    words = [*SMALL, *QUIET, WARM, f"trainer.default_local_dir={folder}", *more]
    report = check([RECIPES[name]], words)
    run_training(report)
    trainer = report.config.trainer
    return folder / trainer.project_name / trainer.experiment_name


@pytest.mark.parametrize("name", sorted(OFFLINE - SLOW))
def test_a_recipe_runs_in_small_and_goes_on(name: str, tmp_path: Path):
    done = run(name, tmp_path, "trainer.total_training_steps=3")
    steps = [line.step for line in read_metrics(done / "metrics.jsonl")]
    assert steps == [0, 1, 2, 3]
    chains = [line.chain for line in read_digests(done / "digests.jsonl")]
    shutil.rmtree(done / "checkpoints" / "step_000003")
    run(name, tmp_path, "trainer.total_training_steps=3")
    assert CheckpointStore(done / "checkpoints").list() == (2, 3)
    assert [line.chain for line in read_digests(done / "digests.jsonl")] == chains


def test_a_step_is_done_again_and_otherwise(tmp_path: Path):
    done = run("dpo", tmp_path, "trainer.total_training_steps=3")
    again = luyen("replay", done, "--step", "3", "--json")
    assert again.exit_code == 0, again.output
    found = json.loads(again.stdout)
    assert found["equal"]
    assert found["checks"][-1]["equal"] == ["prompts", "rollouts", "gradients", "weights"]
    varied = luyen("replay", done, "--step", "3", "--set", "preference.beta=0.5", "--json")
    assert varied.exit_code == 0, varied.output
    page = json.loads(varied.stdout)
    assert page["stages"] == ["gradients", "weights"]
    margin = page["numbers"]["preference/margin"]
    assert margin["after"] == pytest.approx(5 * margin["before"], rel=1e-5)


def test_a_step_is_not_done_again_from_other_rows(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i + 2)} for i in range(8)]
    rows.write_text("\n".join(map(json.dumps, lines)))
    words = (f"data.train_files=[{rows}]", "data.val_files=[]", "data.string_prompts=user")
    words += ("trainer.test_freq=-1",)
    done = run("dpo", tmp_path, "trainer.total_training_steps=2", *words)
    rows.write_text("\n".join(map(json.dumps, lines[::-1])))
    again = luyen("replay", done, "--step", "2")
    assert again.exit_code == 2
    assert "not those that the run learned from" in again.output


def test_a_run_goes_on_with_other_rows_says_so_and_can_be_replayed(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"

    def write(worse: int) -> None:
        lines = [
            {"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i + worse)}
            for i in range(8)
        ]
        rows.write_text("\n".join(map(json.dumps, lines)))

    words = (f"data.train_files=[{rows}]", "data.val_files=[]", "data.string_prompts=user")
    words += ("trainer.test_freq=-1",)
    write(2)
    run("dpo", tmp_path, "trainer.total_training_steps=2", *words)
    write(3)
    with pytest.warns(ChangedRows, match="rows of now"):
        done = run("dpo", tmp_path, "trainer.total_training_steps=4", *words)
    assert luyen("replay", done, "--step", "4").exit_code == 0
    assert luyen("replay", done, "--step", "2").exit_code == 2


def test_a_run_of_another_stage_is_not_gone_on_with(tmp_path: Path):
    done = run("dpo", tmp_path, "trainer.total_training_steps=2")
    before = (done / "config.yaml").read_text()
    words = ("trainer.experiment_name=dpo", "trainer.total_training_steps=3")
    with pytest.raises(UserError, match="has 'preference', and would be another one"):
        run("reward_model", tmp_path, *words)
    assert (done / "config.yaml").read_text() == before


def test_marked_answers_and_pairs_mix_with_a_precomputed_reference(tmp_path: Path):
    files = [f"arithmetic://sum?{kind}=even&size=12" for kind in ("labels", "pairs")]
    words = (f"data.train_files={files}", "data.train_max_samples=24")
    words += ("preference.reference=precomputed", "trainer.total_training_steps=2")
    done = run("kto", tmp_path, *words)
    run("kto", tmp_path, *words[:-1], "trainer.total_training_steps=4")
    assert [line.step for line in read_digests(done / "digests.jsonl")] == [0, 1, 2, 3, 4]


def test_a_precomputed_reference_gives_the_same_run_and_a_replay_asks_for_its_rows_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    chains: list[list[str]] = []
    for kind in ("live", "precomputed"):
        words = ("trainer.total_training_steps=3", f"preference.reference={kind}")
        done = run("kto", tmp_path / kind, *words)
        lines = read_digests(done / "digests.jsonl")
        chains.append([line.stages["weights"] for line in lines if line.step > 0])
    assert chains[0] == chains[1]
    assert (tmp_path / "precomputed/luyen/kto/reference").is_dir()
    monkeypatch.setattr("luyen.train.offline.preference._compute_sums", None)
    again = luyen("replay", tmp_path / "precomputed/luyen/kto", "--step", "3")
    assert again.exit_code == 0, again.output


def test_an_adapter_that_is_off_is_the_reference(tmp_path: Path):
    done = run("dpo", tmp_path, "trainer.total_training_steps=2", f"{MODEL}.lora_rank=4")
    first = next(line for line in read_metrics(done / "metrics.jsonl") if line.step == 0)
    assert first.values["preference/val_accuracy"] == 0.5
    assert first.values["preference/val_margin"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "kto", "simpo", "reward_model"])
def test_a_recipe_learns_its_taste(name: str, tmp_path: Path):
    report = check([RECIPES[name]], [f"trainer.default_local_dir={tmp_path}", *QUIET[:1]])
    (change,) = run_training(report).changes
    assert change.before is not None
    assert change.after is not None
    assert abs(change.before - 0.5) < 0.15
    assert change.after >= LEARN.get(name, 0.9)
