"""O: off-policy samples and the correction that makes them usable."""

from collections.abc import Iterator

from luyen.base.errors import UserError
from luyen.config.plan import is_off_policy
from luyen.config.rules.rule import Finding, Situation, rule
from luyen.config.thresholds import read_limits, rejection_rules

_C = "algorithm.rollout_correction"
_ROLLOUT = "actor_rollout_ref.rollout"


def _corrects(s: Situation) -> bool:
    rollout_correction = s.config.algorithm.rollout_correction
    switches = rollout_correction.rollout_is, rollout_correction.rollout_rs
    return any(switches) or rollout_correction.bypass_mode


@rule("O01", "error")
def async_is_corrected(s: Situation) -> Iterator[Finding]:
    """Training on stale samples needs a rollout correction."""
    trainer = s.config.trainer
    if trainer.max_staleness > 0 and not _corrects(s):
        yield Finding(
            field="trainer.max_staleness",
            why="samples of older weights are biased, and no correction is chosen",
            fix=f"set {_C}.rollout_is=token (or rollout_rs, or bypass_mode), or max_staleness=0",
        )


@rule("O08", "warning")
def async_order_has_effect(s: Situation) -> Iterator[Finding]:
    """The order of rollouts matters only where generation runs ahead."""
    trainer = s.config.trainer
    if trainer.max_staleness == 0 and s.is_changed("trainer.async_order"):
        yield Finding(
            field="trainer.async_order",
            why="generation and training take turns, so it has no effect",
            fix="drop it, or set trainer.max_staleness to 1 or more",
        )


@rule("O02", "error")
def correction_has_log_probs(s: Situation) -> Iterator[Finding]:
    """A correction compares with the sampler's log-probabilities, so they are recorded."""
    rollout = s.config.actor_rollout_ref.rollout
    if _corrects(s) and not rollout.calculate_log_probs:
        yield Finding(
            field=f"{_ROLLOUT}.calculate_log_probs",
            why="rollout correction compares with the sampler's log-probabilities",
            fix="set it to true",
        )


@rule("O03", "error")
def importance_thresholds_are_readable(s: Situation) -> Iterator[Finding]:
    """`rollout_is_threshold` is a number or a band `lo_hi`, and a floor lies below it."""
    rollout_correction = s.config.algorithm.rollout_correction
    try:
        read_limits(rollout_correction.rollout_is_threshold, rollout_correction.rollout_is_floor)
    except UserError as error:
        yield Finding(field=f"{_C}.{error.field}", why=error.why, fix=error.fix)


@rule("O04", "error")
def rejection_criteria_are_readable(s: Situation) -> Iterator[Finding]:
    """Each criterion of `rollout_rs` is known and has a bound that suits it."""
    rollout_correction = s.config.algorithm.rollout_correction
    if rollout_correction.rollout_rs is None:
        return
    try:
        rejection_rules(rollout_correction.rollout_rs, rollout_correction.rollout_rs_threshold)
    except UserError as error:
        yield Finding(field=f"{_C}.{error.field}", why=error.why, fix=error.fix)


@rule("O05", "warning")
def correction_knob_has_effect(s: Situation) -> Iterator[Finding]:
    """Knobs of the correction are changed only where something reads them."""
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
def bypass_mode_has_one_switch(s: Situation) -> Iterator[Finding]:
    """Bypass mode is chosen by its switch, and then no other policy loss is asked for."""
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
def truncated_sampling_meets_ratios(s: Situation) -> Iterator[Finding]:
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
