"""Rules of the doctor on numbers made by hand: where they speak, and where they stay silent."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from luyen.studio.doctor.diagnose import RULES
from luyen.studio.doctor.record import read_run
from tests.unit.studio.run_files import rollout, seen, write_run, write_steps

FLAT = [0.5] * 20


@pytest.mark.parametrize(
    ("rule", "name", "sick", "sound"),
    [
        ("entropy-collapse", "actor/entropy", [1.0] * 15 + [0.01] * 5, [1.0] * 15 + [0.2] * 5),
        ("entropy-blow-up", "actor/entropy", [1.0] * 10 + [2.5] * 5, [1.0] * 10 + [1.8] * 5),
        ("truncation", "response_length/cut_fraction", [0.9] * 5, [0.9] * 4),
        ("clip-saturation", "actor/pg_clipfrac", [0.4] * 5, [0.9, 0.1, 0.9, 0.1, 0.1]),
        ("kl-runaway", "actor/ref_kl", [0.1] * 5 + [2.0] * 5, [1.9] * 5 + [2.0] * 5),
        ("kl-runaway", "actor/ppo_kl", [-0.3] * 5, [0.05] * 5),
        ("parity-gap", "parity/mean_gap", [0.1] * 5, [0.01] * 5),
        ("learning-rate", "actor/lr", [0.1, 0, 0, 0], [0.1, 0, 0]),
        ("learning-rate", "critic/lr", [0, 0, 0], [0, 0, 0, 0.1]),
        ("frozen-parameters", "actor/grad_norm", [0.0] * 5, [0, 0, 0, 0, 0.1]),
        ("skipped-updates", "actor/skipped_updates", [0, 1, 0, 1], [0, 1, 0, 0]),
        ("not-finite", "actor/pg_loss", [0.1, float("inf")], [0.1, 1e30]),
        ("value-loss-explosion", "critic/vf_loss", [0.1] * 5 + [2.0] * 5, [2.0] * 5 + [0.1] * 5),
        ("critic-worse-than-mean", "critic/explained_variance", [-1.0] * 20, [-1.0] * 19),
        ("zero-variance-groups", "group/zero_std_fraction", [1.0] * 5, [0.5] * 5),
        ("rising-faults", "reward/faults", [0.0] * 5 + [40.0] * 5, [30.0] * 5 + [40.0] * 5),
        ("starvation", "group/kept_fraction", [0.1] * 5, [0.5] * 5),
        ("no-validation", "reward/mean", [0.5] * 20, [0.5] * 19),
        ("tools-failing", "tools/success_fraction", [0.0] * 5, [0.9] * 5),
    ],
)
def test_a_course_decides(
    rule: str, name: str, sick: Sequence[float], sound: Sequence[float], tmp_path: Path
):
    [symptom] = seen(write_run(tmp_path / "sick", {name: sick, "parity/max_gap": [0.1] * 5}), rule)
    assert symptom.steps
    assert symptom.experiment.change
    assert (
        seen(write_run(tmp_path / "sound", {name: sound, "parity/max_gap": [0.1] * 5}), rule) == []
    )


def test_one_odd_step_is_no_evidence(tmp_path: Path):
    course = [0.1] * 12
    course[6] = 40.0
    root = write_run(tmp_path / "run", {"critic/vf_loss": course, "actor/entropy": course})
    assert seen(root, "value-loss-explosion") == seen(root, "entropy-blow-up") == []


def test_growth_that_pays_is_no_explosion(tmp_path: Path):
    length = [10.0 * 1.1**i for i in range(20)]
    paid = {"response_length/mean": length, "reward/mean": [0.01 * i for i in range(20)]}
    idle = {"response_length/mean": length, "reward/mean": FLAT}
    spread = {"reward/std": [0.1] * 20}
    assert seen(write_run(tmp_path / "paid", paid | spread), "length-explosion") == []
    assert len(seen(write_run(tmp_path / "idle", idle | spread), "length-explosion")) == 1


def test_a_reward_that_stays_at_its_top_is_only_noted(tmp_path: Path):
    ends = {"reward/min": [0.0] + [1.0] * 5, "reward/max": [1.0] * 6}
    [symptom] = seen(write_run(tmp_path / "top", ends), "reward-all-equal")
    assert symptom.severity == "note"
    flat = {"reward/min": [0.0] * 6, "reward/max": [0.0] * 6}
    [symptom] = seen(write_run(tmp_path / "flat", flat), "reward-all-equal")
    assert symptom.severity is None


def test_a_component_that_is_lost_while_the_whole_rises_is_named(tmp_path: Path):
    courses = {
        "reward/mean": [0.1] * 5 + [0.9] * 5,
        "reward/std": [0.3] * 10,
        "reward/exact/mean": [0.6] * 5 + [0.1] * 5,
        "reward/style/mean": [0.1] * 5 + [0.8] * 5,
    }
    [symptom] = seen(write_run(tmp_path / "run", courses), "reward-hacking")
    assert "reward/exact/mean fell from 0.6 to 0.1" in symptom.says


def test_masks_are_judged_by_origin(tmp_path: Path):
    root = write_run(tmp_path / "run", {})
    right = rollout(1)
    holes = rollout(2, advantages=[None, None, None, None, 1.0])
    spread = rollout(3, advantages=[None, 0.5, None, 1.0, 1.0])
    write_steps(root, [right, holes, spread])
    [empty], [inverted] = seen(root, "empty-mask"), seen(root, "inverted-mask")
    assert (empty.steps, inverted.steps) == ((2,), (3,))
    assert empty.rollouts == ("2.0.2-0/0",)


def test_weights_may_be_as_old_as_the_run_allows(tmp_path: Path):
    for name, allowed in (("strict", 0), ("loose", 2)):
        config = f"trainer: {{max_staleness: {allowed}}}"
        root = write_run(tmp_path / name, {}, config=config)
        write_steps(root, [rollout(5, version=2), rollout(6, version=5)])
        assert len(seen(root, "stale-weights")) == (1 if allowed == 0 else 0)


def test_a_role_is_idle_only_where_roles_work_at_the_same_time(tmp_path: Path):
    courses = {
        "role/actor/busy": [0.9] * 5,
        "wait/actor_idle": [0.2] * 5,
        "role/rollout/busy": [0.2] * 5,
        "wait/rollout_idle": [8.0] * 5,
    }
    ahead = "trainer: {max_staleness: 1}"
    in_turn = write_run(tmp_path / "turn", courses)
    beside = write_run(tmp_path / "beside", courses, config=ahead)
    short = write_run(tmp_path / "short", courses | {"wait/rollout_idle": [0.1] * 5}, config=ahead)
    assert seen(in_turn, "idle-role") == seen(short, "idle-role") == []
    [symptom] = seen(beside, "idle-role")
    assert symptom.says.startswith("rollout works for 20% of the time")


def test_prompts_are_compared_as_tokens_not_by_name(tmp_path: Path):
    root = write_run(tmp_path / "run", {})
    write_steps(root, [rollout(s, draw=d, uid=f"{s}{d}") for s in (1, 2) for d in (0, 1)])
    assert [s.steps for s in seen(root, "duplicate-prompts")] == [(1, 2)]
    assert seen(root, "repeated-prompts") == []


def test_prompts_without_a_marker_and_with_foreign_ids_are_found(tmp_path: Path):
    root = write_run(tmp_path / "run", {})
    write_steps(root, [rollout(1, prompt=(1, 60, 61)), rollout(2, prompt=(0, 0, 2, 500))])
    assert seen(root, "no-chat-template") == []
    said = " ".join(symptom.says for symptom in seen(root, "vocabulary-mismatch"))
    assert "largest id in the rollouts, of a model with 128 rows: 500" in said
    assert "unknown token: 0.286" in said
    write_steps(root, [rollout(3, prompt=(1, 60)), rollout(4, prompt=(1, 60, 61))])
    assert len(seen(root, "no-chat-template")) == 1


def test_hard_prompts_starve_only_where_a_solution_exists(tmp_path: Path):
    never = write_run(tmp_path / "never", {"reward/max": [0.7] * 10})
    once = write_run(tmp_path / "once", {"reward/max": [0.0] * 9 + [1.0]})
    for root in (never, once):
        write_steps(root, [rollout(s, draw=d) for s in (7, 8, 9) for d in range(4)])
        write_steps(root, [rollout(10, reward=1.0)])
    assert seen(never, "starvation") == []
    assert "12 of 13 groups" in seen(once, "starvation")[0].says


def test_three_steps_in_which_every_answer_is_cut_and_scores_alike_are_enough(tmp_path: Path):
    cut = {"response_length/cut_fraction": [1.0] * 3}
    zero = {"reward/min": [0.0] * 3, "reward/max": [0.0] * 3}
    [symptom] = seen(write_run(tmp_path / "cut", {**cut, **zero}), "all-cut-and-alike")
    assert "in all 3 steps every answer ends at the token budget and scores 0" in symptom.says
    some = {**cut, **zero, "reward/max": [0.0, 1.0, 0.0]}
    assert seen(write_run(tmp_path / "some", some), "all-cut-and-alike") == []
    ended = {**zero, "response_length/cut_fraction": [1.0, 0.9, 1.0]}
    assert seen(write_run(tmp_path / "ended", ended), "all-cut-and-alike") == []


@pytest.mark.parametrize(("pushed", "found"), [(0.0, 0), (0.1, 1)])
def test_weights_that_no_gradient_pushes_may_stay(pushed: float, found: int, tmp_path: Path):
    """Where all rewards are alike the gradient is zero, and equal checkpoints are right."""
    root = write_run(
        tmp_path / "run", {"actor/grad_norm": [0.1, 0.0, pushed], "actor/lr": [0.1] * 3}
    )
    record = read_run(root)
    page = {"files": {"actor.safetensors": {"sha256": "a"}}}
    vars(record)["checkpoints"] = {1: page, 3: page}
    assert len(list(RULES["frozen-parameters"].look(record))) == found
