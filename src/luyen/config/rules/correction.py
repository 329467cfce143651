"""O: off-policy samples and the correction that makes them usable."""

from collections.abc import Iterator

from luyen.base.suggest import did_you_mean
from luyen.config.catalog import REJECTION_CRITERIA
from luyen.config.plan import is_off_policy
from luyen.config.rules.rule import Finding, Situation, rule

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
def importance_threshold_is_readable(s: Situation) -> Iterator[Finding]:
    """`rollout_is_threshold` is a number above 0, or a band `lo_hi`."""
    rollout_correction = s.config.algorithm.rollout_correction
    threshold = rollout_correction.rollout_is_threshold
    if _band(threshold) is None:
        yield Finding(
            field=f"{_C}.rollout_is_threshold",
            why="neither a number > 0 nor a band `lo_hi` with 0 < lo < hi",
            fix="write e.g. 2.0 (truncate) or 0.5_5 (zero outside the band)",
        )


@rule("O04", "error")
def rejection_criteria_exist(s: Situation) -> Iterator[Finding]:
    """Each criterion of `rollout_rs` is known and has a readable bound."""
    rollout_correction = s.config.algorithm.rollout_correction
    if rollout_correction.rollout_rs is None:
        return
    criteria = [name.strip() for name in rollout_correction.rollout_rs.split(",")]
    for name in criteria:
        if name not in REJECTION_CRITERIA:
            fix = did_you_mean(name, REJECTION_CRITERIA)
            yield Finding(field=f"{_C}.rollout_rs", why=f"no criterion `{name}`", fix=fix)
    threshold = rollout_correction.rollout_rs_threshold
    bounds = [] if threshold is None else str(threshold).split(",")
    if len(bounds) not in (1, len(criteria)) or any(_band(b.strip()) is None for b in bounds):
        yield Finding(
            field=f"{_C}.rollout_rs_threshold",
            why=f"{len(criteria)} criteria need one bound for all or one each: numbers or `lo_hi`",
            fix="write e.g. 0.01, or 0.5_2.0 for a k1 criterion",
        )


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
    floor = rollout_correction.rollout_is_floor
    if floor is not None and isinstance(rollout_correction.rollout_is_threshold, str):
        why = "a band zeroes weights outside of it; a floor belongs to truncation by a number"
        yield Finding(field=f"{_C}.rollout_is_floor", why=why, fix="drop the floor or the band")


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
    """Top-p and top-k change the sampled distribution, while ratios use the full softmax."""
    rollout = s.config.actor_rollout_ref.rollout
    if rollout.top_p == 1.0 and rollout.top_k in (-1, 0):
        return
    if is_off_policy(s.config) or _corrects(s):
        yield Finding(
            field=f"{_ROLLOUT}.{'top_p' if rollout.top_p < 1 else 'top_k'}",
            why="samples come from a truncated distribution while ratios compare full softmax "
            "log-probabilities: off-policy ratios are biased by the mass cut away",
            fix="set top_p=1 and top_k=-1 for training (val_kwargs may keep them)",
        )


def _band(threshold: float | str | None) -> tuple[float, float] | None:
    """Bounds of a threshold; a number u stands for (0, u); None when it cannot be read."""
    try:
        bounds = [float(part) for part in str(threshold).split("_")]
    except ValueError:
        return None
    if len(bounds) == 1 and bounds[0] > 0:
        return 0.0, bounds[0]
    if len(bounds) == 2 and 0 < bounds[0] < bounds[1]:
        return bounds[0], bounds[1]
    return None
