"""Y, H, J: offline stages, distillation from a teacher, online preference pairs."""

from collections.abc import Iterator

from luyen.base.errors import did_you_mean
from luyen.config.catalog import PREFERENCE_LOSSES, PreferenceFacts
from luyen.config.plan import (
    ONLINE_PAIRS,
    has_teacher,
    is_pure_distillation,
    loss_in_force,
    makes_pairs,
    pairs_need_reference,
    preference_kwargs,
)
from luyen.config.rules.rule import Finding, RuleContext, rule

_BLOCKS = {"sft": "sft", "preference": "preference", "reward_training": "reward_model"}
"""Block -> the stage that reads it."""
_ONLINE = (
    *("algorithm.", "critic.", "reward.", "sandbox.", "trainer.critic_warmup"),
    *("trainer.max_staleness", "trainer.async_order"),
    *(f"actor_rollout_ref.{block}." for block in ("actor", "rollout", "ref")),
)
"""Keys that `trainer.stage: rl` reads."""
_ACTOR = "actor_rollout_ref.actor"
_READ = (
    *(f"{_ACTOR}.optim.", f"{_ACTOR}.use_dynamic_bsz", f"{_ACTOR}.ppo_max_token_len_per_gpu"),
    *(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{_ACTOR}.strategy", f"{_ACTOR}.fsdp_config."),
)
"""Those of them that every offline stage reads, or that a rule of their own speaks of."""
_AGGREGATED = (f"{_ACTOR}.loss_agg_mode", f"{_ACTOR}.loss_scale_factor")
_EXACT = "actor_rollout_ref.rollout.deterministic"
_READ_BY = {
    "sft": _AGGREGATED,
    "distill": (*_AGGREGATED, _EXACT),
    "preference": ("actor_rollout_ref.ref.path", _EXACT),
}
"""Further keys that some offline stages read."""
_FUSED = "actor_rollout_ref.model.use_fused_kernels"
_UNREAD_BY = {"distill": (_FUSED,), "reward_model": (_FUSED,)}
"""Keys of the model that some stages leave unread: without log-probabilities of the
sampled tokens alone there is no head to fuse."""
_PREFERENCE_ESTIMATOR = "online_dpo"
"""Reads `preference` in reinforcement runs."""


@rule("Y01", "error")
def preference_losses_are_known(s: RuleContext) -> Iterator[Finding]:
    """Every preference loss is built in or registered by a plugin, and all read the same rows."""
    if not _reads_preference(s):
        return
    field, names = "preference.loss_type", s.config.preference.loss_type
    known = s.known.preference_losses
    for name in names:
        if name not in known:
            fix = did_you_mean(name, known)
            yield Finding(field=field, why=f"no preference loss `{name}`", fix=fix)
    kinds = {known[name].kind for name in names if name in known}
    if len(kinds) > 1:
        why = "some of these losses read pairs and some read marked answers"
        yield Finding(field=field, why=why, fix="mix losses of one kind")
    if not names:
        yield Finding(field=field, why="there is nothing to minimise", fix="set it to sigmoid")


@rule("Y02", "error")
def mixture_weights_fit(s: RuleContext) -> Iterator[Finding]:
    """A mixture of losses has one weight for each, or none."""
    preference = s.config.preference
    weights, losses = preference.loss_weights, preference.loss_type
    if _reads_preference(s) and weights and len(weights) != len(losses):
        why = f"there are {len(losses)} losses and {len(weights)} weights"
        yield Finding(field="preference.loss_weights", why=why, fix="give one weight for each")


@rule("Y03", "error")
def preference_keys_are_read(s: RuleContext) -> Iterator[Finding]:
    """A hyperparameter of `preference` is read by a loss that is chosen."""
    preference, facts = s.config.preference, _facts(s)
    if not _reads_preference(s) or len(facts) != len(preference.loss_type):
        return
    said = " + ".join(preference.loss_type)
    read = {hparam for fact in facts for hparam in fact.hparams}
    for name in preference_kwargs(preference):
        if name not in read:
            why = f"`{said}` does not read it"
            yield Finding(field=f"preference.{name}", why=why, fix="drop the line")
    if preference.use_margins and not any("margins" in fact.optional for fact in facts):
        why = f"`{said}` does not read margins"
        yield Finding(field="preference.use_margins", why=why, fix="set it to false")
    is_ratio = all(fact.kind == "pair" and fact.reference for fact in facts)
    if preference.ld_alpha is not None and not is_ratio:
        why = f"`{said}` is not a function of the log-ratios of a pair"
        yield Finding(field="preference.ld_alpha", why=why, fix="set it to null")


@rule("Y11", "error")
def divergence_fits_every_loss(s: RuleContext) -> Iterator[Finding]:
    """Another divergence than reverse KL has a meaning in every loss of the mixture."""
    kind = s.config.preference.f_divergence_type
    if not _reads_preference(s) or kind in (None, "reverse_kl"):
        return
    readers = [fact for fact in _facts(s) if "f_divergence_type" in fact.hparams]
    for name, fact in zip(s.config.preference.loss_type, _facts(s), strict=False):
        if readers and fact.reference and fact not in readers:
            yield Finding(
                field="preference.f_divergence_type",
                why=f"`{name}` is not a function of the difference of a pair, to which `{kind}` "
                "applies",
                fix="set it to reverse_kl, or drop the loss",
            )


@rule("Y04", "warning")
def reference_is_used(s: RuleContext) -> Iterator[Finding]:
    """A reference is prepared only where a loss compares with one."""
    facts = _facts(s)
    if s.config.trainer.stage != "preference" or not facts:
        return
    if any(fact.reference for fact in facts):
        return
    said = " + ".join(s.config.preference.loss_type)
    for field in ("preference.reference", "actor_rollout_ref.ref.path"):
        if s.is_changed(field):
            why = f"`{said}` compares with no reference"
            yield Finding(field=field, why=why, fix="drop the line")


@rule("Y05", "warning")
def blocks_belong_to_the_stage(s: RuleContext) -> Iterator[Finding]:
    """A block of an offline stage is written only where that stage, or what reads it, runs."""
    stage = s.config.trainer.stage
    for name, reader in _BLOCKS.items():
        if stage == reader or (name == "preference" and _reads_preference(s)):
            continue
        changed = [path for path in s.written if path.startswith(f"{name}.") and s.is_changed(path)]
        for path in sorted(changed):
            why = f"the stage is `{stage}`, and only `{reader}` reads it"
            yield Finding(field=path, why=why, fix=f"set trainer.stage={reader}, or drop the line")


@rule("Y07", "warning")
def columns_are_those_of_the_format(s: RuleContext) -> Iterator[Finding]:
    """Offline rows are read in the format that a file has, not by keys of the configuration."""
    if s.config.trainer.stage == "rl":
        return
    for name in ("prompt_key", "ground_truth_key", "filter_overlong_prompts", "truncation"):
        if s.is_changed(f"data.{name}"):
            why = "offline stages read the columns of known formats and drop rows that are too long"
            fix = "drop the line; `luyen data inspect` shows what is read"
            yield Finding(field=f"data.{name}", why=why, fix=fix)


@rule("Y10", "note")
def keys_belong_to_the_stage(s: RuleContext) -> Iterator[Finding]:
    """Keys about rollouts, rewards and credit are changed only where a run has them."""
    stage = s.config.trainer.stage
    if stage == "rl":
        return
    changed = [path for path in sorted(s.written) if s.is_changed(path) and is_unread(path, stage)]
    for block in dict.fromkeys(_block_of(path) for path in changed):
        paths = [path for path in changed if _block_of(path) == block]
        also = f" (nor {', '.join(paths[1:])})" if len(paths) > 1 else ""
        why = f"the stage `{stage}` does not read it{also}: it has no effect"
        fix = "drop it, or leave it if other stages share the file"
        yield Finding(field=paths[0], why=why, fix=fix)


@rule("Y06", "error")
def supervised_loss_is_known(s: RuleContext) -> Iterator[Finding]:
    """The loss of a supervised run is built in or registered by a plugin."""
    known, name = s.known.supervised_losses, s.config.sft.loss
    if s.config.trainer.stage == "sft" and name not in known:
        why = f"no supervised loss `{name}`"
        yield Finding(field="sft.loss", why=why, fix=did_you_mean(name, known))


def is_unread(path: str, stage: str) -> bool:
    """Whether an offline stage leaves a key of the blocks that rollouts share unread.

    Example:
        >>> [is_unread(key, "sft") for key in ("algorithm.gamma", f"{_ACTOR}.optim.lr")]
        [True, False]
    """
    if path in _UNREAD_BY.get(stage, ()):
        return True
    if path.startswith(_READ) or path in _READ_BY.get(stage, ()):
        return False
    return path.startswith(_ONLINE)


def _block_of(path: str) -> str:
    """The part of the run that a key is about."""
    names = path.split(".")
    return ".".join(names[: 2 if names[0] == "actor_rollout_ref" else 1])


def _reads_preference(s: RuleContext) -> bool:
    trainer, algorithm = s.config.trainer, s.config.algorithm
    if trainer.stage == "rl":
        return algorithm.adv_estimator == _PREFERENCE_ESTIMATOR
    return trainer.stage == "preference"


def _facts(s: RuleContext) -> list[PreferenceFacts]:
    """Facts of the chosen losses that are known."""
    known = s.known.preference_losses
    return [known[name] for name in s.config.preference.loss_type if name in known]


# H: distillation from a teacher.

_OFFLINE_KEYS = ("divergence", "beta", "top_k", "temperature", "nll_weight")
"""Keys that act on given answers, in `trainer.stage: distill`."""


@rule("H01", "error")
def teacher_is_named(s: RuleContext) -> Iterator[Finding]:
    """A run that learns from a teacher names it."""
    if has_teacher(s.config) and s.config.distill.teacher_path is None:
        yield Finding(
            field="distill.teacher_path",
            why="no teacher is named for the student",
            fix="set it to a model directory, a hub id or a `builtin://` name",
        )


@rule("H02", "error")
def own_samples_belong_to_rl(s: RuleContext) -> Iterator[Finding]:
    """Learning from a teacher on the student's own samples is `trainer.stage: rl`."""
    stage = s.config.trainer.stage
    if s.config.distill.on_policy and stage != "rl":
        why = f"the stage `{stage}` learns on the rows that are given, and samples nothing"
        fix = "set trainer.stage=rl, or drop it"
        yield Finding(field="distill.on_policy", why=why, fix=fix)


@rule("H03", "warning")
def distillation_key_has_effect(s: RuleContext) -> Iterator[Finding]:
    """Keys of `distill` are changed only where they are read."""
    distill, stage = s.config.distill, s.config.trainer.stage
    unread: dict[str, str] = {}
    if not has_teacher(s.config):
        unread["teacher_path"] = "set trainer.stage=distill, or distill.on_policy=true"
    if stage != "distill":
        unread |= dict.fromkeys(_OFFLINE_KEYS, "set trainer.stage=distill")
    elif distill.divergence != "jsd":
        unread["beta"] = "set distill.divergence=jsd"
    if stage == "distill" and distill.divergence != "topk_forward_kl":
        unread["top_k"] = "set distill.divergence=topk_forward_kl"
    if stage != "rl" or not distill.on_policy:
        unread["task_weight"] = "set trainer.stage=rl and distill.on_policy=true"
    for name, fix in unread.items():
        if s.is_changed(f"distill.{name}"):
            why = "it has no effect in this configuration"
            yield Finding(field=f"distill.{name}", why=why, fix=f"drop it, or {fix}")


@rule("H04", "error")
def nothing_asks_for_absent_rewards(s: RuleContext) -> Iterator[Finding]:
    """Where the teacher alone decides, nothing else needs the rewards of samples."""
    config = s.config
    if not is_pure_distillation(config):
        return
    sampler = config.data.sampler
    needs_rewards = {
        "algorithm.filter_groups.enable": config.algorithm.filter_groups.enable,
        "algorithm.use_kl_in_reward": config.algorithm.use_kl_in_reward,
        "critic.enable": bool(config.critic.enable),
        "data.sampler.name": sampler.class_path is None and sampler.name == "curriculum",
    }
    for field, is_on in needs_rewards.items():
        if is_on:
            why = "distill.task_weight is 0: no sample gets a reward"
            yield Finding(field=field, why=why, fix="drop it, or set distill.task_weight")


@rule("H05", "warning")
def estimator_has_effect(s: RuleContext) -> Iterator[Finding]:
    """An advantage estimator is chosen only where rewards are among what is learned from."""
    if is_pure_distillation(s.config) and s.is_changed("algorithm.adv_estimator"):
        yield Finding(
            field="algorithm.adv_estimator",
            why="distill.task_weight is 0, so it has no effect",
            fix="drop it, or set distill.task_weight",
        )


# J: online preference pairs, inside the RL loop.

_CORRECTION = "algorithm.rollout_correction"
_PREFERENCE = "preference"
_ROWS_ONLY = ("use_margins", "reference")
"""Keys that concern rows of pairs."""


@rule("J01", "error")
def pairs_make_one_step(s: RuleContext) -> Iterator[Finding]:
    """The derivative of a preference loss is applied once, to all pairs of a step, as it is."""
    if not makes_pairs(s.config):
        return
    actor = s.config.actor_rollout_ref.actor
    correction = s.config.algorithm.rollout_correction
    prompts = s.config.data.train_batch_size
    wrong = {
        f"{_ACTOR}.policy_loss.loss_mode": (loss_in_force(s.config) != "reinforce", "reinforce"),
        f"{_ACTOR}.loss_agg_mode": (actor.loss_agg_mode != "token-sum", "token-sum"),
        f"{_ACTOR}.ppo_epochs": (actor.ppo_epochs > 1, "1"),
        f"{_ACTOR}.ppo_mini_batch_size": (actor.ppo_mini_batch_size < prompts, f"{prompts}"),
        f"{_CORRECTION}.rollout_is": (correction.rollout_is is not None, "null"),
        f"{_CORRECTION}.rollout_rs": (correction.rollout_rs is not None, "null"),
        f"{_CORRECTION}.bypass_mode": (correction.bypass_mode, "false"),
    }
    for field, (is_wrong, value) in wrong.items():
        if is_wrong:
            why = f"`{ONLINE_PAIRS}` gives every sample the derivative of the preference loss, "
            why += "which holds for one plain step on the whole batch"
            yield Finding(field=field, why=why, fix=f"set it to {value}")


@rule("J02", "error")
def loss_compares_pairs(s: RuleContext) -> Iterator[Finding]:
    """Sampled pairs are compared by losses over pairs, with the reference that those need."""
    if not makes_pairs(s.config):
        return
    for name in s.config.preference.loss_type:
        facts = PREFERENCE_LOSSES.get(name)
        if facts is not None and facts.kind != "pair":
            why = f"`{name}` is a loss over marked answers, and samples are compared in pairs"
            fix = "choose a loss over pairs, such as sigmoid"
            yield Finding(field=f"{_PREFERENCE}.loss_type", why=why, fix=fix)
    if pairs_need_reference(s.config) and s.config.actor_rollout_ref.ref.enable is False:
        why = f"`{ONLINE_PAIRS}` compares the policy with a reference"
        fix = "drop the line, or choose a loss without one, such as simpo"
        yield Finding(field="actor_rollout_ref.ref.enable", why=why, fix=fix)


@rule("J03", "warning")
def key_of_rows_has_effect(s: RuleContext) -> Iterator[Finding]:
    """Keys that concern rows of pairs are not changed where pairs are sampled."""
    for name in _ROWS_ONLY:
        field = f"{_PREFERENCE}.{name}"
        if makes_pairs(s.config) and s.is_changed(field):
            why = "pairs are sampled, and no row says it, so it has no effect"
            yield Finding(field=field, why=why, fix="drop the line")


# A: what ends a stage before its last step.

_STOPPING = "trainer.early_stopping"
_WITHOUT_EFFECT = ("patience", "minimum_change", "mode")


@rule("A13", "error")
def stopping_metric_is_measured(s: RuleContext) -> Iterator[Finding]:
    """The metric of early stopping is measured more often than once."""
    trainer, early_stopping = s.config.trainer, s.config.trainer.early_stopping
    metric = early_stopping.metric
    if metric is None:
        return
    field = f"{_STOPPING}.metric"
    if metric.startswith("val/") and trainer.stage != "rl":
        why = f"a run of the stage {trainer.stage} measures no such metric"
        fix = "set it to one that it does, e.g. sft/val_nll or preference/val_accuracy"
        yield Finding(field=field, why=why, fix=fix)
    elif not (metric.startswith("val/") or "/val_" in metric):
        return
    elif not s.config.data.val_files:
        why = "data.val_files is empty: nothing measures it"
        fix = "set data.val_files, or a metric of training such as reward/mean"
        yield Finding(field=field, why=why, fix=fix)
    elif trainer.test_freq < 1:
        why = "trainer.test_freq is -1: it is measured at the end only, when nothing is to stop"
        yield Finding(field=field, why=why, fix="set trainer.test_freq")


@rule("A14", "warning")
def stopping_key_has_effect(s: RuleContext) -> Iterator[Finding]:
    """Keys of early stopping are changed only where a metric is named."""
    for name in _WITHOUT_EFFECT:
        if s.config.trainer.early_stopping.metric is None and s.is_changed(f"{_STOPPING}.{name}"):
            why = f"{_STOPPING}.metric is not set, so it has no effect"
            yield Finding(field=f"{_STOPPING}.{name}", why=why, fix="set the metric, or drop it")
