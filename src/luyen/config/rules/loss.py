"""L: policy losses, their knobs and their aggregation."""

from collections.abc import Iterator

from luyen.base.suggest import did_you_mean
from luyen.config.catalog import POLICY_LOSSES
from luyen.config.fields import all_fields
from luyen.config.plan import loss_in_force
from luyen.config.rules.rule import Finding, Situation, rule

_ACTOR = "actor_rollout_ref.actor"
_MODE = f"{_ACTOR}.policy_loss.loss_mode"


@rule("L01", "error")
def loss_exists(s: Situation) -> Iterator[Finding]:
    """`loss_mode` is a registered name."""
    name = s.config.actor_rollout_ref.actor.policy_loss.loss_mode
    if name not in s.known.losses:
        fix = did_you_mean(name, s.known.losses)
        yield Finding(field=_MODE, why="no such policy loss is registered", fix=fix)


@rule("L02", "warning")
def loss_knob_has_effect(s: Situation) -> Iterator[Finding]:
    """A knob of a policy loss is changed only where the loss in force reads it."""
    everyone = {knob for facts in POLICY_LOSSES.values() for knob in facts.knobs}
    for knob in sorted(everyone - set(s.loss.knobs if s.loss else everyone)):
        for path in (f"{_ACTOR}.{knob}", f"{_ACTOR}.policy_loss.{knob}"):
            if path in all_fields() and s.is_changed(path):
                readers = [name for name, facts in s.known.losses.items() if knob in facts.knobs]
                yield Finding(
                    field=path,
                    why=f"the loss `{loss_in_force(s.config)}` does not read it",
                    fix=f"drop it; it is read by {', '.join(readers)}",
                )


@rule("L03", "error")
def dro_has_its_beta(s: Situation) -> Iterator[Finding]:
    """dro has no default for the weight of its quadratic term."""
    policy_loss = s.config.actor_rollout_ref.actor.policy_loss
    if policy_loss.loss_mode == "dro" and policy_loss.dro_beta is None:
        yield Finding(
            field=f"{_ACTOR}.policy_loss.dro_beta",
            why="dro's quadratic term needs a weight, and no value suits every task",
            fix="set it to a number > 0, e.g. 0.1",
        )


@rule("L04", "warning")
def loss_scale_has_effect(s: Situation) -> Iterator[Finding]:
    """`loss_scale_factor` is set only for the aggregation that divides by it."""
    actor = s.config.actor_rollout_ref.actor
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield Finding(
            field=f"{_ACTOR}.loss_scale_factor",
            why=f"loss_agg_mode={actor.loss_agg_mode or 'null'} does not divide by it",
            fix="drop it, or set loss_agg_mode=seq-mean-token-sum-norm",
        )


@rule("L05", "warning")
def sequence_ratio_has_a_narrow_clip(s: Situation) -> Iterator[Finding]:
    """gspo clips a length-normalised ratio, which moves a thousand times less than a token's."""
    actor = s.config.actor_rollout_ref.actor
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    if actor.policy_loss.loss_mode in ("gspo", "gspo_token") and min(low, high) > 0.01:
        yield Finding(
            field=f"{_ACTOR}.clip_ratio",
            why=f"a sequence ratio clipped at {low} and {high} is never clipped in practice; "
            "the paper uses 3e-4 and 4e-4",
            fix="set clip_ratio_low=3e-4 and clip_ratio_high=4e-4",
        )


@rule("L06", "warning")
def aggregation_departs_from_the_loss(s: Situation) -> Iterator[Finding]:
    """An aggregation other than a sequence loss's own is honoured, where verl ignores it."""
    actor = s.config.actor_rollout_ref.actor
    own = s.loss.aggregation if s.loss else "token-mean"
    if own != "token-mean" and actor.loss_agg_mode not in (None, own):
        yield Finding(
            field=f"{_ACTOR}.loss_agg_mode",
            why=f"the loss `{loss_in_force(s.config)}` is defined with {own}; another one is "
            "honoured here, while verl silently uses its own",
            fix=f"drop it to get {own}",
        )


@rule("L07", "error")
def entropy_range_is_a_range(s: Situation) -> Iterator[Finding]:
    """The adaptive entropy coefficient has room to move and a place to start in."""
    actor = s.config.actor_rollout_ref.actor
    adaptive_entropy = actor.adaptive_entropy
    low, high = adaptive_entropy.min, adaptive_entropy.max
    if adaptive_entropy.enable and not low <= actor.entropy_coeff <= high:
        yield Finding(
            field=f"{_ACTOR}.entropy_coeff",
            why=f"the adaptive coefficient starts here and must lie between {low} and {high}",
            fix="move entropy_coeff, or adaptive_entropy.min and .max",
        )


@rule("L09", "error")
def vespo_takes_token_weights(s: Situation) -> Iterator[Finding]:
    """vespo sums log-weights over a sequence, so they must be given once a token."""
    rollout_correction = s.config.algorithm.rollout_correction
    if loss_in_force(s.config) == "vespo" and rollout_correction.rollout_is not in (None, "token"):
        yield Finding(
            field="algorithm.rollout_correction.rollout_is",
            why="vespo adds up the log-weights of a sequence; a sequence weight would be counted "
            "once for each of its tokens",
            fix="set it to token",
        )


@rule("L08", "warning")
def adaptive_entropy_is_on(s: Situation) -> Iterator[Finding]:
    """Keys of `adaptive_entropy` are changed only when it is enabled."""
    adaptive_entropy = s.config.actor_rollout_ref.actor.adaptive_entropy
    read = {
        "target": adaptive_entropy.target,
        "delta": adaptive_entropy.delta,
        "min": adaptive_entropy.min,
        "max": adaptive_entropy.max,
    }
    for name in read:
        path = f"{_ACTOR}.adaptive_entropy.{name}"
        if not adaptive_entropy.enable and s.is_changed(path):
            yield Finding(
                field=path,
                why="the entropy coefficient is fixed, so it has no effect",
                fix=f"drop it, or set {_ACTOR}.adaptive_entropy.enable=true",
            )
