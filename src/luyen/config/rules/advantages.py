"""A, O: advantage estimators and their inputs, off-policy samples and their correction."""

from collections.abc import Iterator

from luyen.base.errors import UserError, did_you_mean
from luyen.config.catalog import ADV_ESTIMATORS, read_limits, rejection_rules
from luyen.config.fields import all_fields
from luyen.config.plan import is_off_policy
from luyen.config.reward_components import score_names
from luyen.config.rules.rule import Finding, RuleContext, rule

_NAME = "algorithm.adv_estimator"
_N = "actor_rollout_ref.rollout.n"


@rule("A01", "error")
def estimator_exists(s: RuleContext) -> Iterator[Finding]:
    """`adv_estimator` is a registered name."""
    name = s.config.algorithm.adv_estimator
    if name not in s.known.estimators:
        fix = did_you_mean(name, s.known.estimators)
        yield Finding(field=_NAME, why="no such advantage estimator is registered", fix=fix)


@rule("A02", "error")
def group_has_siblings(s: RuleContext) -> Iterator[Finding]:
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
def estimator_has_its_critic(s: RuleContext) -> Iterator[Finding]:
    """An estimator that needs values has a critic."""
    if s.estimator and "values" in s.estimator.needs and s.config.critic.enable is False:
        yield Finding(
            field="critic.enable",
            why=f"`{s.config.algorithm.adv_estimator}` needs the values of a critic",
            fix=f"drop the line, or choose {_NAME}=grpo with {_N} >= 2",
        )


@rule("A04", "error")
def critic_is_used(s: RuleContext) -> Iterator[Finding]:
    """A critic is trained only for an estimator that reads its values."""
    if s.estimator and "values" not in s.estimator.needs and s.config.critic.enable:
        yield Finding(
            field="critic.enable",
            why=f"`{s.config.algorithm.adv_estimator}` never reads a value: the critic would cost "
            "memory and time without effect",
            fix=f"drop the line, or choose {_NAME}=gae",
        )


@rule("A05", "error")
def component_weights_match(s: RuleContext) -> Iterator[Finding]:
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
def token_baseline_has_its_statistic(s: RuleContext) -> Iterator[Finding]:
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
def estimator_key_has_effect(s: RuleContext) -> Iterator[Finding]:
    """A hyperparameter of an estimator is changed only if the chosen estimator reads it."""
    everyone = {hparam for facts in ADV_ESTIMATORS.values() for hparam in facts.hparams}
    for hparam in sorted(everyone - set(s.estimator.hparams if s.estimator else everyone)):
        if f"algorithm.{hparam}" in all_fields() and s.is_changed(f"algorithm.{hparam}"):
            readers = [n for n, facts in s.known.estimators.items() if hparam in facts.hparams]
            yield Finding(
                field=f"algorithm.{hparam}",
                why=f"`{s.config.algorithm.adv_estimator}` does not read it",
                fix=f"drop it; it is read by {', '.join(readers)}",
            )


@rule("A08", "error")
def filter_has_a_metric(s: RuleContext) -> Iterator[Finding]:
    """Dynamic sampling names the score that must differ, and has siblings to compare."""
    filter_groups = s.config.algorithm.filter_groups
    if filter_groups.enable and filter_groups.metric is None:
        yield Finding(
            field="algorithm.filter_groups.metric",
            why="groups are dropped when this score is the same for all samples, and none is named",
            fix="set it to `reward`, or to a part of the reward, such as a component",
        )
    if filter_groups.enable and s.config.actor_rollout_ref.rollout.n < 2:
        yield Finding(
            field="algorithm.filter_groups.enable",
            why="a group of one sample never differs: every group would be dropped",
            fix=f"set {_N} >= 2",
        )


@rule("A09", "warning")
def samples_are_compared(s: RuleContext) -> Iterator[Finding]:
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
def named_scores_exist(s: RuleContext) -> Iterator[Finding]:
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


# O: off-policy samples and the correction that makes them usable.

_C = "algorithm.rollout_correction"
_ROLLOUT = "actor_rollout_ref.rollout"


def _corrects(s: RuleContext) -> bool:
    rollout_correction = s.config.algorithm.rollout_correction
    switches = rollout_correction.rollout_is, rollout_correction.rollout_rs
    return any(switches) or rollout_correction.bypass_mode


@rule("O01", "error")
def async_is_corrected(s: RuleContext) -> Iterator[Finding]:
    """Training on stale samples needs a rollout correction."""
    trainer = s.config.trainer
    if trainer.max_staleness > 0 and not _corrects(s):
        yield Finding(
            field="trainer.max_staleness",
            why="samples of older weights are biased, and no correction is chosen",
            fix=f"set {_C}.rollout_is=token (or rollout_rs, or bypass_mode), or max_staleness=0",
        )


@rule("O08", "warning")
def async_order_has_effect(s: RuleContext) -> Iterator[Finding]:
    """The order of rollouts matters only where generation runs ahead."""
    trainer = s.config.trainer
    if trainer.max_staleness == 0 and s.is_changed("trainer.async_order"):
        yield Finding(
            field="trainer.async_order",
            why="generation and training take turns, so it has no effect",
            fix="drop it, or set trainer.max_staleness to 1 or more",
        )


@rule("O02", "error")
def correction_has_log_probs(s: RuleContext) -> Iterator[Finding]:
    """A correction compares with the sampler's log-probabilities, so they are recorded."""
    rollout = s.config.actor_rollout_ref.rollout
    if _corrects(s) and not rollout.calculate_log_probs:
        yield Finding(
            field=f"{_ROLLOUT}.calculate_log_probs",
            why="rollout correction compares with the sampler's log-probabilities",
            fix="set it to true",
        )


@rule("O03", "error")
def importance_thresholds_are_readable(s: RuleContext) -> Iterator[Finding]:
    """`rollout_is_threshold` is a number or a band `lo_hi`, and a floor is below it."""
    rollout_correction = s.config.algorithm.rollout_correction
    try:
        read_limits(rollout_correction.rollout_is_threshold, rollout_correction.rollout_is_floor)
    except UserError as error:
        yield Finding(field=f"{_C}.{error.field}", why=error.why, fix=error.fix)


@rule("O04", "error")
def rejection_criteria_are_readable(s: RuleContext) -> Iterator[Finding]:
    """Each criterion of `rollout_rs` is known and has a bound that suits it."""
    rollout_correction = s.config.algorithm.rollout_correction
    if rollout_correction.rollout_rs is None:
        return
    try:
        rejection_rules(rollout_correction.rollout_rs, rollout_correction.rollout_rs_threshold)
    except UserError as error:
        yield Finding(field=f"{_C}.{error.field}", why=error.why, fix=error.fix)


@rule("O05", "warning")
def correction_key_has_effect(s: RuleContext) -> Iterator[Finding]:
    """Hyperparameters of the rollout correction are changed only if they are read."""
    rollout_correction = s.config.algorithm.rollout_correction
    off: list[str] = []
    if rollout_correction.rollout_is is None:
        off += ["rollout_is_threshold", "rollout_is_floor", "rollout_is_batch_normalize"]
    if rollout_correction.rollout_rs is None:
        off.append("rollout_rs_threshold")
    if not rollout_correction.bypass_mode:
        off.append("loss_type")
    needs = {"rollout_rs_threshold": "rollout_rs", "loss_type": "bypass_mode"}
    for name in off:
        if s.is_changed(f"{_C}.{name}"):
            needed = needs.get(name, "rollout_is")
            why, fix = f"{needed} is off, so it has no effect", f"drop it, or set {_C}.{needed}"
            yield Finding(field=f"{_C}.{name}", why=why, fix=fix)


@rule("O06", "error")
def bypass_mode_has_one_switch(s: RuleContext) -> Iterator[Finding]:
    """Bypass mode is chosen by `bypass_mode`, and then no other policy loss is set."""
    mode = s.config.actor_rollout_ref.actor.policy_loss.loss_mode
    bypass = s.config.algorithm.rollout_correction.bypass_mode
    field = "actor_rollout_ref.actor.policy_loss.loss_mode"
    if bypass and mode not in ("vanilla", "bypass_mode"):
        why = f"bypass mode brings its own loss ({_C}.loss_type): `{mode}` would be ignored"
        yield Finding(field=field, why=why, fix=f"drop it, or set {_C}.bypass_mode=false")
    if mode == "bypass_mode" and not bypass:
        why = "this loss reads the sampler's log-probabilities as the old ones"
        yield Finding(field=field, why=why, fix=f"set {_C}.bypass_mode=true instead")


@rule("O07", "warning")
def truncated_sampling_meets_ratios(s: RuleContext) -> Iterator[Finding]:
    """What rules tokens out changes the sampled distribution; ratios use the full softmax."""
    rollout = s.config.actor_rollout_ref.rollout
    off = {
        "top_p=1": rollout.top_p == 1.0,
        "top_k=-1": rollout.top_k in (-1, 0),
        "min_p=0": rollout.min_p == 0.0,
        "min_new_tokens=0": rollout.min_new_tokens == 0,
    }
    on = [setting for setting, is_off in off.items() if not is_off]
    if on and (is_off_policy(s.config) or _corrects(s)):
        yield Finding(
            field=f"{_ROLLOUT}.{on[0].partition('=')[0]}",
            why="samples come from a truncated distribution while ratios compare full softmax "
            "log-probabilities: off-policy ratios are biased by the mass cut away",
            fix=f"set {' and '.join(on)} for training (val_kwargs may keep them)",
        )
