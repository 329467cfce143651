"""What a command changes about a measurement, and what it leaves alone."""

import pytest

from luyen.base.errors import UserError
from luyen.config.schema.run import RunConfig
from luyen.pipeline.policy_loading import EvalOverrides, eval_config, read_config, with_model_of

VAL_KWARGS = "actor_rollout_ref.rollout.val_kwargs"


def drawn(config: RunConfig, **asked: object) -> tuple[int, bool, float, float]:
    changed = eval_config(config, EvalOverrides(**asked))  # pyright: ignore[reportArgumentType]
    val_kwargs = changed.actor_rollout_ref.rollout.val_kwargs
    return val_kwargs.n, val_kwargs.do_sample, val_kwargs.temperature, val_kwargs.top_p


def test_nothing_asked_leaves_the_draws_as_they_are():
    sampled = read_config([], [f"{VAL_KWARGS}.n=4", f"{VAL_KWARGS}.do_sample=true"])
    for config in (RunConfig(), sampled):
        asked = eval_config(config, EvalOverrides())
        assert asked.actor_rollout_ref == config.actor_rollout_ref
        assert asked.data == config.data
        assert asked.reward.on_fault == "drop"


def test_several_samples_are_drawn_as_in_training_unless_validation_says_otherwise():
    own = [f"{VAL_KWARGS}.do_sample=true", f"{VAL_KWARGS}.temperature=0.6"]
    assert drawn(RunConfig(), samples=8) == (8, True, 1.0, 1.0)
    warm = read_config([], ["actor_rollout_ref.rollout.temperature=0.7"])
    assert drawn(warm, samples=8) == (8, True, 0.7, 1.0)
    assert drawn(read_config([], own), samples=8) == (8, True, 0.6, 1.0)
    assert drawn(read_config([], own), samples=8, temperature=0.2, top_p=0.9) == (8, True, 0.2, 0.9)


def test_temperature_0_takes_the_likeliest_token_once():
    own = read_config([], [f"{VAL_KWARGS}.n=4", f"{VAL_KWARGS}.do_sample=true"])
    assert drawn(own, temperature=0.0)[:2] == (1, False)
    for more in ({"samples": 2}, {"top_p": 0.5}):
        with pytest.raises(UserError, match="--temperature"):
            drawn(RunConfig(), temperature=0.0, **more)


def test_min_p_samples_and_stop_texts_end_answers_greedy_or_not():
    changed = eval_config(RunConfig(), EvalOverrides(min_p=0.1, stop=("\n",)))
    val_kwargs = changed.actor_rollout_ref.rollout.val_kwargs
    assert (val_kwargs.do_sample, val_kwargs.min_p, val_kwargs.stop) == (True, 0.1, ("\n",))
    greedy = eval_config(RunConfig(), EvalOverrides(temperature=0.0, stop=("\n",)))
    assert greedy.actor_rollout_ref.rollout.val_kwargs.stop == ("\n",)
    with pytest.raises(UserError, match="--min-p"):
        eval_config(RunConfig(), EvalOverrides(temperature=0.0, min_p=0.1))


def test_a_rule_takes_the_place_of_the_whole_reward_and_rows_of_the_rows():
    own = read_config([], ["reward.components.a.rule=exact_match", "data.val_files=a.jsonl"])
    asked = eval_config(own, EvalOverrides(reward="numeric", data=("b.jsonl",)))
    assert asked.reward.components == {"numeric": {"rule": "numeric"}}
    assert asked.data.val_files == ("b.jsonl",)


def test_the_model_of_another_configuration_comes_alone():
    one = read_config([], ["trainer.seed=5", "actor_rollout_ref.model.path=a"])
    two = read_config([], ["trainer.seed=6", "actor_rollout_ref.model.path=b"])
    mixed = with_model_of(one, two)
    assert mixed.actor_rollout_ref.model.path == "b"
    assert mixed.trainer.seed == 5
