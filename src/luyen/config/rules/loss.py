"""L, K: policy losses, their hyperparameters and aggregation, KL terms and the reference."""

from collections.abc import Iterator

from luyen.base.errors import did_you_mean
from luyen.config.catalog import KL_KINDS, POLICY_LOSSES
from luyen.config.fields import all_fields
from luyen.config.plan import loss_in_force, needs_reference, pairs_need_reference
from luyen.config.rules.rule import Finding, RuleContext, rule

_ACTOR = "actor_rollout_ref.actor"
_MODE = f"{_ACTOR}.policy_loss.loss_mode"


@rule("L01", "error")
def loss_exists(s: RuleContext) -> Iterator[Finding]:
    """`loss_mode` is a registered name."""
    name = s.config.actor_rollout_ref.actor.policy_loss.loss_mode
    if name not in s.known.losses:
        fix = did_you_mean(name, s.known.losses)
        yield Finding(field=_MODE, why="no such policy loss is registered", fix=fix)


@rule("L02", "warning")
def loss_key_has_effect(s: RuleContext) -> Iterator[Finding]:
    """A hyperparameter of a policy loss is changed only if the loss in force reads it."""
    everyone = {hparam for facts in POLICY_LOSSES.values() for hparam in facts.hparams}
    for hparam in sorted(everyone - set(s.loss.hparams if s.loss else everyone)):
        for path in (f"{_ACTOR}.{hparam}", f"{_ACTOR}.policy_loss.{hparam}"):
            if path in all_fields() and s.is_changed(path):
                readers = [
                    name for name, facts in s.known.losses.items() if hparam in facts.hparams
                ]
                yield Finding(
                    field=path,
                    why=f"the loss `{loss_in_force(s.config)}` does not read it",
                    fix=f"drop it; it is read by {', '.join(readers)}",
                )


@rule("L03", "error")
def dro_has_its_beta(s: RuleContext) -> Iterator[Finding]:
    """dro has no default for the weight of its quadratic term."""
    policy_loss = s.config.actor_rollout_ref.actor.policy_loss
    if policy_loss.loss_mode == "dro" and policy_loss.dro_beta is None:
        yield Finding(
            field=f"{_ACTOR}.policy_loss.dro_beta",
            why="dro's quadratic term needs a weight, and no value suits every task",
            fix="set it to a number > 0, e.g. 0.1",
        )


@rule("L04", "warning")
def loss_scale_has_effect(s: RuleContext) -> Iterator[Finding]:
    """`loss_scale_factor` is set only for the aggregation that divides by it."""
    actor = s.config.actor_rollout_ref.actor
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield Finding(
            field=f"{_ACTOR}.loss_scale_factor",
            why=f"loss_agg_mode={actor.loss_agg_mode or 'null'} does not divide by it",
            fix="drop it, or set loss_agg_mode=seq-mean-token-sum-norm",
        )


@rule("L05", "warning")
def sequence_ratio_has_a_narrow_clip(s: RuleContext) -> Iterator[Finding]:
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
def aggregation_departs_from_the_loss(s: RuleContext) -> Iterator[Finding]:
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
def entropy_range_is_a_range(s: RuleContext) -> Iterator[Finding]:
    """The adaptive entropy coefficient has room to move and a place to start in."""
    actor = s.config.actor_rollout_ref.actor
    adaptive_entropy = actor.adaptive_entropy
    low, high = adaptive_entropy.min, adaptive_entropy.max
    if adaptive_entropy.enable and not low <= actor.entropy_coeff <= high:
        yield Finding(
            field=f"{_ACTOR}.entropy_coeff",
            why=f"the adaptive coefficient starts here and must be between {low} and {high}",
            fix="move entropy_coeff, or adaptive_entropy.min and .max",
        )


@rule("L09", "error")
def vespo_takes_token_weights(s: RuleContext) -> Iterator[Finding]:
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
def adaptive_entropy_is_on(s: RuleContext) -> Iterator[Finding]:
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


# K: KL terms and the reference policy they compare with.

_REF = "actor_rollout_ref.ref"


def _kl_is_on(s: RuleContext) -> bool:
    return s.config.actor_rollout_ref.actor.use_kl_loss or s.config.algorithm.use_kl_in_reward


@rule("K01", "error")
def kl_has_a_reference(s: RuleContext) -> Iterator[Finding]:
    """A KL term has a reference policy to compare with."""
    ref = s.config.actor_rollout_ref.ref
    if _kl_is_on(s) and ref.enable is False:
        yield Finding(
            field=f"{_REF}.enable",
            why="use_kl_loss or use_kl_in_reward is on and there is no reference policy",
            fix="drop the line, or switch the KL terms off",
        )


@rule("K02", "warning")
def kl_is_counted_once(s: RuleContext) -> Iterator[Finding]:
    """KL enters the loss or the reward, rarely both."""
    algorithm = s.config.algorithm
    if s.config.actor_rollout_ref.actor.use_kl_loss and algorithm.use_kl_in_reward:
        yield Finding(
            field="algorithm.use_kl_in_reward",
            why="KL to the reference is penalised twice: in the reward and in the loss",
            fix="keep one of use_kl_loss and use_kl_in_reward",
        )


@rule("K03", "warning")
def kl_has_weight(s: RuleContext) -> Iterator[Finding]:
    """A KL term that is on has a coefficient above 0."""
    actor, algorithm = s.config.actor_rollout_ref.actor, s.config.algorithm
    kl_ctrl = algorithm.kl_ctrl
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield Finding(
            field=f"{_ACTOR}.kl_loss_coef",
            why="the KL term costs a reference pass and its weight is 0",
            fix="raise it, or set use_kl_loss=false",
        )
    if algorithm.use_kl_in_reward and kl_ctrl.kl_coef == 0:
        yield Finding(
            field="algorithm.kl_ctrl.kl_coef",
            why="the KL term costs a reference pass and its weight is 0",
            fix="raise it, or set use_kl_in_reward=false",
        )


@rule("K04", "warning")
def kl_key_has_effect(s: RuleContext) -> Iterator[Finding]:
    """Hyperparameters of a KL term are changed only if the term is on."""
    actor, algorithm = s.config.actor_rollout_ref.actor, s.config.algorithm
    off: list[tuple[str, str]] = []
    if not actor.use_kl_loss:
        off += [
            (f"{_ACTOR}.{k}", f"{_ACTOR}.use_kl_loss") for k in ("kl_loss_coef", "kl_loss_type")
        ]
    switch = "algorithm.use_kl_in_reward"
    if not algorithm.use_kl_in_reward:
        hparams = ("kl_penalty", "kl_ctrl.type", "kl_ctrl.kl_coef")
        off += [(f"algorithm.{k}", switch) for k in hparams]
    if not algorithm.use_kl_in_reward or algorithm.kl_ctrl.type == "fixed":
        adaptive = "algorithm.kl_ctrl.type=adaptive with algorithm.use_kl_in_reward"
        off += [(f"algorithm.kl_ctrl.{k}", adaptive) for k in ("horizon", "target_kl")]
    for path, needs in off:
        if s.is_changed(path):
            yield Finding(
                field=path,
                why="it has no effect in this configuration",
                fix=f"drop it, or set {needs}=true",
            )


@rule("K05", "warning")
def reference_passes_are_not_tiny(s: RuleContext) -> Iterator[Finding]:
    """With KL on, the reference pass is cut no finer than the actor's update."""
    actor, ref = s.config.actor_rollout_ref.actor, s.config.actor_rollout_ref.ref
    if not needs_reference(s.config):
        return
    # Both sides in tokens: the one may be cut by tokens and the other by sequences.
    longest, dynamic = s.batch.longest_sequence, ref.log_prob_use_dynamic_bsz
    actors = actor.ppo_max_token_len_per_gpu
    if not actor.use_dynamic_bsz:
        actors = (actor.ppo_micro_batch_size_per_gpu or 1) * longest
    if dynamic if dynamic is not None else actor.use_dynamic_bsz:
        key, mine, unit = "log_prob_max_token_len_per_gpu", ref.log_prob_max_token_len_per_gpu, 1
        mine = actor.ppo_max_token_len_per_gpu if mine is None else mine
    else:
        key, unit = "log_prob_micro_batch_size_per_gpu", longest
        mine = ref.log_prob_micro_batch_size_per_gpu
    if mine is not None and mine * unit < actors // unit * unit:
        yield Finding(
            field=f"{_REF}.{key}",
            why=f"a pass of the reference holds at most {mine * unit} tokens and one of the "
            f"actor's update {actors}, although a pass without gradients needs less memory: the "
            "reference becomes the bottleneck",
            fix=f"set it to at least {actors // unit}",
        )


@rule("K10", "warning")
def pool_of_the_reference_keeps_up(s: RuleContext) -> Iterator[Finding]:
    """Devices of the reference alone are not so few that those of the actor wait for them."""
    if s.where.reference_pool is None:
        return
    nodes, each = s.where.reference_pool
    actors, references = s.where.world_size, nodes * each
    if actors > _PASSES_OF_AN_UPDATE * references:
        yield Finding(
            field=f"{_REF}.nnodes",
            why=f"{references} {'device computes' if references == 1 else 'devices compute'} "
            f"the reference's log-probabilities of what {actors} devices train on: about "
            f"{actors / references:.3g} times as long as the actor's own, and the update waits",
            fix=f"give it {-(-actors // _PASSES_OF_AN_UPDATE)} devices or more, or set it to 0 to "
            "share those of the actor",
        )


_PASSES_OF_AN_UPDATE = 4
"""Forward passes that an update of the same tokens costs, with gradient checkpointing."""


@rule("K06", "error")
def kl_estimator_exists(s: RuleContext) -> Iterator[Finding]:
    """KL estimators are known, and computable from the log-probabilities that a run keeps."""
    actor, algorithm = s.config.actor_rollout_ref.actor, s.config.algorithm
    for path, kind in (
        (f"{_ACTOR}.kl_loss_type", actor.kl_loss_type),
        ("algorithm.kl_penalty", algorithm.kl_penalty),
    ):
        if kind not in KL_KINDS:
            fix = did_you_mean(kind, KL_KINDS)
            yield Finding(field=path, why="no such KL estimator", fix=fix)
        elif kind.startswith("full"):
            yield Finding(
                field=path,
                why="the exact KL needs every logit of both models; a run keeps log-probabilities "
                "of sampled tokens",
                fix="use low_var_kl; luyen.algorithms.kl.full_kl is there for logits of your own",
            )


@rule("K07", "warning")
def reference_is_used(s: RuleContext) -> Iterator[Finding]:
    """A reference policy is kept only for a KL term, and its keys are set only when it exists."""
    ref = s.config.actor_rollout_ref.ref
    if ref.enable and not _kl_is_on(s) and not pairs_need_reference(s.config):
        yield Finding(
            field=f"{_REF}.enable",
            why="no KL term reads it: KL drift is measured for the price of a pass a step",
            fix="drop the line unless you want that measurement",
        )
    if not needs_reference(s.config):
        for name in (
            "path",
            "log_prob_micro_batch_size_per_gpu",
            "log_prob_use_dynamic_bsz",
            "log_prob_max_token_len_per_gpu",
        ):
            if s.is_changed(f"{_REF}.{name}"):
                why = "the run keeps no reference policy, so it has no effect"
                fix = "drop it, or switch a KL term on"
                yield Finding(field=f"{_REF}.{name}", why=why, fix=fix)


@rule("K09", "error")
def adaptive_coefficient_stays_positive(s: RuleContext) -> Iterator[Finding]:
    """An adaptive KL coefficient starts above 0 and cannot be corrected past it."""
    kl_ctrl = s.config.algorithm.kl_ctrl
    if not s.config.algorithm.use_kl_in_reward or kl_ctrl.type == "fixed":
        return
    if kl_ctrl.kl_coef == 0:
        yield Finding(
            field="algorithm.kl_ctrl.kl_coef",
            why=f"an adaptive coefficient is multiplied towards target_kl={kl_ctrl.target_kl}; "
            "starting at 0 it stays there",
            fix="start at 0.001",
        )
    if s.batch.rollouts >= 5 * kl_ctrl.horizon:
        yield Finding(
            field="algorithm.kl_ctrl.horizon",
            why=f"a step of {s.batch.rollouts} rollouts moves the coefficient by up to 20 % x "
            f"{s.batch.rollouts} / {kl_ctrl.horizon}, past 0",
            fix=f"set it well above {s.batch.rollouts // 5}",
        )


@rule("K08", "error")
def lora_reference_is_the_base(s: RuleContext) -> Iterator[Finding]:
    """With LoRA the reference is the actor with its adapter off, not another checkpoint."""
    model, ref = s.config.actor_rollout_ref.model, s.config.actor_rollout_ref.ref
    if model.lora_rank > 0 and ref.path is not None:
        yield Finding(
            field=f"{_REF}.path",
            why="with LoRA the reference is the actor with its adapter off: a separate copy would "
            "double the weights and could differ from the base model",
            fix="drop the line, or train all weights (lora_rank=0)",
        )
