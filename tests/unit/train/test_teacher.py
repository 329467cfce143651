"""Runs with a teacher, on given answers and on the student's own, and with sampled pairs."""

from pathlib import Path

import pytest
import torch

from luyen.base.errors import UserError
from luyen.data.tokenizer import load_tokenizer
from luyen.engine.batch import pack
from luyen.studio.replay.record import ReplayRecord
from luyen.studio.replay.replay import replay_step
from luyen.telemetry.rollout_files import read_rollouts
from luyen.train.advantages import AdvantageConfig, compute_advantages
from luyen.train.builders.roles import load_teacher
from luyen.train.loop import train_online
from luyen.train.offline.loop import train_offline
from luyen.train.offline.start import prepare_offline
from tests.runs import (
    ACTOR,
    MODEL,
    ROLLOUT,
    Ran,
    close,
    prepare,
    read_back,
    report_of,
    same_weights,
    train,
)

TEACHER = "distill.teacher_path=builtin://arithmetic"
OWN = ("distill.on_policy=true", TEACHER, "algorithm.adv_estimator=gae")
MIXED = ("distill.on_policy=true", TEACHER, "distill.task_weight=0.5")
PAIRS = (
    "algorithm.adv_estimator=online_dpo",
    f"{ACTOR}.policy_loss.loss_mode=reinforce",
    f"{ACTOR}.loss_agg_mode=token-sum",
)
GIVEN = (
    "trainer.stage=distill",
    TEACHER,
    "data.train_files=arithmetic://sum?digits=1&size=32&traces=1",
    "data.val_files=arithmetic://sum?digits=1&traces=1&split=held-out",
    "trainer.total_training_steps=4",
)
SAVED = ("trainer.total_training_steps=4", "trainer.save_freq=2")


def given(folder: Path, *words: str, until: int | None = None) -> Ran:
    """An offline run from its beginning, or from where it stopped."""
    run = prepare_offline(report_of(folder, *GIVEN, *words))
    run.total_steps = until or run.total_steps
    try:
        train_offline(run)
    finally:
        run.recorder.close()
    return read_back(run.recorder.directory.root)


def test_a_student_comes_nearer_to_its_teacher_on_given_answers(tmp_path: Path):
    course = given(tmp_path, f"{ACTOR}.optim.lr=1.0e-2").course("distill/val_divergence")
    assert course[-1] < course[0] - 0.3


def test_a_distillation_that_was_interrupted_ends_as_one_that_was_not(tmp_path: Path):
    whole = given(tmp_path / "whole")
    given(tmp_path / "cut", until=2)
    again = given(tmp_path / "cut")
    assert same_weights(whole, again)
    names = {path.name for path in (again.root / "checkpoints").glob("step_*/*")}
    assert not {name for name in names if "teacher" in name}


@pytest.mark.parametrize("words", [OWN, MIXED, PAIRS], ids=["alone", "mixed", "pairs"])
def test_an_online_run_that_was_interrupted_ends_as_one_that_was_not(
    words: tuple[str, ...], tmp_path: Path
):
    whole = train(tmp_path / "whole", *words, *SAVED)
    run = prepare(tmp_path / "cut", *words, *SAVED)
    run.total_steps = 2
    try:
        train_online(run)
    finally:
        close(run)
    again = train(tmp_path / "cut", *words, *SAVED)
    assert same_weights(whole, again)
    assert [m.get("distill/reverse_kl") for m in whole.metrics] == [
        m.get("distill/reverse_kl") for m in again.metrics
    ]


@pytest.mark.parametrize("words", [OWN, MIXED, PAIRS], ids=["alone", "mixed", "pairs"])
def test_a_step_comes_again_from_its_files(words: tuple[str, ...], tmp_path: Path):
    ran = train(tmp_path, *words)
    found = replay_step(ReplayRecord(ran.root), 2, lambda done, total, checked: None)
    assert found.is_equal


def test_a_teacher_alone_needs_no_reward_and_asks_for_none(tmp_path: Path):
    broken = tmp_path / "broken.py"
    broken.write_text("def compute_score(**_):\n    raise RuntimeError('nobody should ask')\n")
    words = (*OWN, f"reward.custom_reward_function.path={broken}", f"{ROLLOUT}.n=2")
    ran = train(tmp_path / "runs", *words)
    assert not [name for name in ran.metrics[-1] if name.startswith("reward/")]
    assert ran.metrics[-1]["distill/reverse_kl"] > 0
    recorded = read_rollouts(ran.root / "rollouts" / "step_000002.parquet")
    assert all(one.rollout.score is None and one.advantages is not None for one in recorded)


def test_the_teachers_advantage_and_the_tasks_are_added_by_weight():
    batch = pack([(5, 6, 7), (5, 8, 9)], masks=[[False, True, True]] * 2, groups=[0, 0])
    batch = batch.with_streams(
        rewards=torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
        rollout_logp=torch.zeros(6),
        old_logp=torch.tensor([0.0, -1.0, -2.0, 0.0, -0.5, -1.0]),
        teacher_logp=torch.tensor([9.0, -0.5, -3.0, 9.0, -0.5, -1.5]),
    )
    rules = AdvantageConfig(
        estimator="rloo",
        hparams={},
        is_group_relative=True,
        kl_kind=None,
        correction=None,
        task_weight=0.5,
    )
    found = compute_advantages(batch, rules, kl_coef=0.0)
    assert found.batch.streams["advantages"].tolist() == [0.0, 1.0, -0.5, 0.0, -0.5, -1.0]
    assert found.metrics["distill/reverse_kl"] == pytest.approx(0.25)


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path):
    config = report_of(tmp_path, *OWN, "distill.teacher_path=builtin://tools").config
    tokenizer = load_tokenizer("builtin://arithmetic")
    with pytest.raises(UserError, match="its tokens are not the student's") as caught:
        load_teacher(config, tokenizer, "cpu")
    assert caught.value.field == "distill.teacher_path"
    assert tokenizer.difference(load_tokenizer("builtin://arithmetic")) is None


def test_what_cannot_be_loaded_is_said_of_the_teacher(tmp_path: Path):
    config = report_of(tmp_path, *OWN, f"distill.teacher_path={tmp_path}").config
    with pytest.raises(UserError, match=r"tokenizer\.json: it is not there") as caught:
        load_teacher(config, load_tokenizer("builtin://arithmetic"), "cpu")
    assert caught.value.field == "distill.teacher_path"


def test_the_plan_shows_the_teacher_with_its_own_size(tmp_path: Path):
    small = f"{MODEL}.override_config={{num_hidden_layers: 1}}"
    report = report_of(tmp_path, *OWN, small)
    assert [role.name for role in report.plan.where.roles] == ["actor", "teacher", "rollout"]
    assert report.plan.memory is not None
    parts = report.plan.memory.peak.parts
    assert parts["teacher"] > 2 * parts["weights"]
