"""A: advantage estimators, and what each needs from the rest of the run."""

from collections.abc import Iterator

from luyen.base.suggest import did_you_mean
from luyen.config.catalog import ADV_ESTIMATORS
from luyen.config.fields import all_fields
from luyen.config.reward_names import score_names
from luyen.config.rules.rule import Finding, Situation, rule

_NAME = "algorithm.adv_estimator"
_N = "actor_rollout_ref.rollout.n"


@rule("A01", "error")
def estimator_exists(s: Situation) -> Iterator[Finding]:
    """`adv_estimator` is a registered name."""
    name = s.config.algorithm.adv_estimator
    if name not in s.known.estimators:
        fix = did_you_mean(name, s.known.estimators)
        yield Finding(field=_NAME, why="no such advantage estimator is registered", fix=fix)


@rule("A02", "error")
def group_has_siblings(s: Situation) -> Iterator[Finding]:
    """A group-relative estimator compares at least 2 samples of a prompt."""
    rollout = s.config.actor_rollout_ref.rollout
    if s.estimator and s.estimator.group_relative and rollout.n < 2:
        yield Finding(
            field=_N,
            why=f"`{s.config.algorithm.adv_estimator}` compares the samples of a group; one sample "
            "always gets advantage 0",
            fix=f"set {_N} >= 2, or {_NAME}=reinforce_plus_plus",
        )


@rule("A03", "error")
def estimator_has_its_critic(s: Situation) -> Iterator[Finding]:
    """An estimator that needs values has a critic."""
    if s.estimator and "values" in s.estimator.needs and s.config.critic.enable is False:
        yield Finding(
            field="critic.enable",
            why=f"`{s.config.algorithm.adv_estimator}` needs the values of a critic",
            fix=f"drop the line, or choose {_NAME}=grpo with {_N} >= 2",
        )


@rule("A04", "error")
def critic_is_used(s: Situation) -> Iterator[Finding]:
    """A critic is trained only for an estimator that reads its values."""
    if s.estimator and "values" not in s.estimator.needs and s.config.critic.enable:
        yield Finding(
            field="critic.enable",
            why=f"`{s.config.algorithm.adv_estimator}` never reads a value: the critic would cost "
            "memory and time without effect",
            fix=f"drop the line, or choose {_NAME}=gae",
        )


@rule("A05", "error")
def component_weights_match(s: Situation) -> Iterator[Finding]:
    """gdpo has one weight for each reward component, and none of them is named twice."""
    algorithm = s.config.algorithm
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if len(set(keys)) < len(keys):
        why, fix = "a component is named twice", "name each once"
        yield Finding(field="algorithm.gdpo_reward_keys", why=why, fix=fix)
    if weights and len(weights) != len(keys):
        yield Finding(
            field="algorithm.gdpo_reward_weights",
            why=f"{len(weights)} weights for {len(keys)} components (gdpo_reward_keys)",
            fix="give one weight for each component",
        )


@rule("A06", "error")
def token_baseline_has_its_statistic(s: Situation) -> Iterator[Finding]:
    """The optimal token baselines need Σπ² of each token."""
    actor = s.config.actor_rollout_ref.actor
    needed = s.estimator is not None and "sum_pi_squared" in s.estimator.needs
    if needed and not actor.calculate_sum_pi_squared:
        yield Finding(
            field="actor_rollout_ref.actor.calculate_sum_pi_squared",
            why=f"`{s.config.algorithm.adv_estimator}` weighs tokens by Σπ²",
            fix="set it to true",
        )
    if s.estimator is not None and not needed and actor.calculate_sum_pi_squared:
        yield Finding(
            field="actor_rollout_ref.actor.calculate_sum_pi_squared",
            why=f"`{s.config.algorithm.adv_estimator}` never reads Σπ²",
            fix="drop the line",
        )


@rule("A07", "warning")
def estimator_knob_has_effect(s: Situation) -> Iterator[Finding]:
    """A knob of an estimator is changed only where the chosen estimator reads it."""
    everyone = {knob for facts in ADV_ESTIMATORS.values() for knob in facts.knobs}
    for knob in sorted(everyone - set(s.estimator.knobs if s.estimator else everyone)):
        if f"algorithm.{knob}" in all_fields() and s.is_changed(f"algorithm.{knob}"):
            readers = [n for n, facts in s.known.estimators.items() if knob in facts.knobs]
            yield Finding(
                field=f"algorithm.{knob}",
                why=f"`{s.config.algorithm.adv_estimator}` does not read it",
                fix=f"drop it; it is read by {', '.join(readers)}",
            )


@rule("A08", "error")
def filter_has_a_metric(s: Situation) -> Iterator[Finding]:
    """Dynamic sampling names the score that must differ, and has siblings to compare."""
    filter_groups = s.config.algorithm.filter_groups
    if filter_groups.enable and filter_groups.metric is None:
        yield Finding(
            field="algorithm.filter_groups.metric",
            why="groups are dropped when this score is the same for all samples, and none is named",
            fix="set it to `reward`, `acc` or a reward component",
        )
    if filter_groups.enable and s.config.actor_rollout_ref.rollout.n < 2:
        yield Finding(
            field="algorithm.filter_groups.enable",
            why="a group of one sample never differs: every group would be dropped",
            fix=f"set {_N} >= 2",
        )


@rule("A09", "warning")
def samples_are_compared(s: Situation) -> Iterator[Finding]:
    """Several samples of a prompt are compared with each other."""
    rollout = s.config.actor_rollout_ref.rollout
    if s.estimator and not s.estimator.group_relative and rollout.n > 1:
        yield Finding(
            field=_N,
            why=f"`{s.config.algorithm.adv_estimator}` does not compare the {rollout.n} samples of "
            "a prompt; more prompts would bring more variety for the same cost",
            fix=f"set {_N}=1, or choose a group-relative estimator such as grpo or rloo",
        )


@rule("A10", "error")
def named_scores_exist(s: Situation) -> Iterator[Finding]:
    """A score that is named is one that the reward has, as far as that shows before scoring."""
    algorithm, names = s.config.algorithm, score_names(s.config)
    if names is None:
        return
    filter_groups = algorithm.filter_groups
    if filter_groups.enable and filter_groups.metric not in (None, *names):
        yield Finding(
            field="algorithm.filter_groups.metric",
            why="the reward has no such part",
            fix=did_you_mean(str(filter_groups.metric), names),
        )
    if algorithm.adv_estimator == "gdpo":
        for name in algorithm.gdpo_reward_keys:
            if name not in names:
                why, fix = f"the reward has no part `{name}`", did_you_mean(name, names)
                yield Finding(field="algorithm.gdpo_reward_keys", why=why, fix=fix)
