"""Every recipe runs, and every recipe learns."""

from pathlib import Path

import pytest

from luyen.config.catalog import ADV_ESTIMATORS, POLICY_LOSSES
from luyen.config.check import Report, check
from luyen.config.reward_components import read_components, read_routes
from luyen.rewards.build import routes_in_force
from luyen.rewards.rules.all import rule_rewards
from luyen.train.start import run_training
from tests.e2e.recipes import LEARNED, ONLINE, RECIPES, learning, small
from tests.runs import ACTOR, ROLLOUT, train

ESTIMATORS_NEED = {
    "gae": [f"{ROLLOUT}.n=1"],
    "remax": [f"{ROLLOUT}.n=1"],
    "reinforce": [f"{ROLLOUT}.n=1"],
    "reinforce_plus_plus": [f"{ROLLOUT}.n=1"],
    "gdpo": ["algorithm.gdpo_reward_keys=[digits, letters]"],
    "online_dpo": [
        f"{ACTOR}.policy_loss.loss_mode=reinforce",
        f"{ACTOR}.loss_agg_mode=token-sum",
    ],
    "optimal_token_baseline": [f"{ACTOR}.calculate_sum_pi_squared=true"],
    "tir_optimal_token_baseline": [f"{ACTOR}.calculate_sum_pi_squared=true"],
}
LOSSES_NEED = {
    "dro": [f"{ACTOR}.policy_loss.dro_beta=0.1"],
    "bypass_mode": ["algorithm.rollout_correction.bypass_mode=true"],
}
UNREAD = {"gpg", "reinforce"}
"""Losses without a ratio: they do not read what the sampler's policy was."""
STEPS = 25


@pytest.mark.parametrize("name", ONLINE)
def test_a_recipe_runs_in_small(name: str, tmp_path: Path):
    done = train(tmp_path, *small(name), files=[RECIPES[name]])
    assert [int(values["step"]) for values in done.metrics] == [0, 1, 2]
    assert set(done.course("parity/max_gap")) == {0.0}
    assert done.course("actor/grad_norm")[-1] > 0
    assert "val/accuracy" in done.metrics[-1]


def can_run_out_of_time(report: Report) -> bool:
    """Whether a rule that judges the rows of a recipe works under a time limit."""
    reward = report.config.reward
    routes = routes_in_force(read_routes(reward), read_components(reward)[0])
    # The data source of a made row is its address: arithmetic://sum gives arithmetic/sum.
    sources = [url.partition("?")[0].replace("://", "/") for url in report.config.data.train_files]
    taken = [next(r for r in routes if r.matches(source)) for source in sources]
    rules = {part.rule for route in taken for part in route.components.values()}
    return any(rule_rewards.facts(rule).get("isolated") for rule in rules)


@pytest.mark.parametrize("name", ONLINE)
def test_a_recipe_whose_verifier_may_run_out_of_time_says_what_follows(name: str):
    report = check([RECIPES[name]])
    assert not can_run_out_of_time(report) or "reward.on_fault" in report.origins
    hard = check([RECIPES[name]], ["reward.components={hard: {rule: math}}", "reward.routes={}"])
    assert can_run_out_of_time(hard)


def test_the_recipe_of_the_built_in_model_runs_in_small(tmp_path: Path):
    words = ["trainer.total_training_steps=2", f"trainer.default_local_dir={tmp_path}"]
    words += ["data.train_files=arithmetic://sum?digits=1&traces=2", "data.train_batch_size=8"]
    words += [f"{ACTOR}.optim.lr_warmup_steps=1", "trainer.logger=jsonl", "trainer.test_freq=-1"]
    summary = run_training(check([RECIPES["builtin_arithmetic"]], words))
    before, after = summary.changes[0].before, summary.changes[0].after
    assert before is not None
    assert after is not None
    assert after < before


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", LEARNED)
def test_a_recipe_raises_its_reward(name: str, seed: int, tmp_path: Path):
    done = train(tmp_path, *learning(seed=seed, steps=STEPS), files=[RECIPES[name]])
    before, *_, after = done.course("val/reward/mean@1")
    print(f"{name} seed {seed}: {before:.3f} -> {after:.3f}")
    assert before < 0.7
    assert after > before + 0.1


@pytest.mark.slow
def test_on_policy_distillation_halves_the_distance_to_the_teacher(tmp_path: Path):
    done = train(tmp_path, *learning(seed=0, steps=40), files=[RECIPES["on_policy_distill"]])
    before, *_, after = done.course("distill/reverse_kl")
    print(f"on_policy_distill: {before:.3f} -> {after:.3f}")
    assert after < before / 2


@pytest.mark.slow
def test_distillation_on_given_answers_brings_the_student_near_its_teacher(tmp_path: Path):
    words = [*learning(seed=0, steps=40), f"trainer.default_local_dir={tmp_path}"]
    summary = run_training(check([RECIPES["distill"]], words))
    before, after = summary.changes[0].before, summary.changes[0].after
    assert before is not None
    assert after is not None
    assert after < before / 3


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
def test_every_estimator_runs_by_its_name(name: str, tmp_path: Path):
    done = train(tmp_path, f"algorithm.adv_estimator={name}", *ESTIMATORS_NEED.get(name, []))
    assert all(norm > 0 for norm in done.course("actor/grad_norm"))
    assert set(done.course("parity/max_gap")) == {0.0}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_runs_by_its_name(name: str, tmp_path: Path):
    words = [f"{ACTOR}.policy_loss.loss_mode={name}", f"{ACTOR}.ppo_mini_batch_size=2"]
    done = train(tmp_path, *words, *LOSSES_NEED.get(name, []))
    assert all(norm > 0 for norm in done.course("actor/grad_norm"))
    # The second mini-batch of a step is off-policy.
    assert name in UNREAD or all(kl != 0 for kl in done.course("actor/ppo_kl"))
