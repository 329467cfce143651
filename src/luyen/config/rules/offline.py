"""Y: stages that learn from given rows."""

from collections.abc import Iterator

from luyen.base.suggest import did_you_mean
from luyen.config.catalog import PreferenceFacts
from luyen.config.preference_knobs import preference_knobs
from luyen.config.rules.rule import Finding, Situation, rule

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
"""Those that some stages read besides."""
_PREFERENCE_ESTIMATOR = "online_dpo"
"""Reads `preference` in reinforcement runs."""


@rule("Y01", "error")
def preference_losses_are_known(s: Situation) -> Iterator[Finding]:
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
def mixture_weights_fit(s: Situation) -> Iterator[Finding]:
    """A mixture of losses has one weight for each, or none."""
    preference = s.config.preference
    weights, losses = preference.loss_weights, preference.loss_type
    if _reads_preference(s) and weights and len(weights) != len(losses):
        why = f"there are {len(losses)} losses and {len(weights)} weights"
        yield Finding(field="preference.loss_weights", why=why, fix="give one weight for each")


@rule("Y03", "error")
def preference_knobs_are_read(s: Situation) -> Iterator[Finding]:
    """A knob of `preference` is read by a loss that is chosen."""
    preference, facts = s.config.preference, _facts(s)
    if not _reads_preference(s) or len(facts) != len(preference.loss_type):
        return
    said = " + ".join(preference.loss_type)
    read = {knob for fact in facts for knob in fact.knobs}
    for name in preference_knobs(preference):
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


@rule("Y04", "warning")
def reference_is_used(s: Situation) -> Iterator[Finding]:
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
def blocks_belong_to_the_stage(s: Situation) -> Iterator[Finding]:
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
def columns_are_those_of_the_format(s: Situation) -> Iterator[Finding]:
    """Offline rows are read in the format that a file has, not by keys of the configuration."""
    if s.config.trainer.stage == "rl":
        return
    for name in ("prompt_key", "ground_truth_key", "filter_overlong_prompts", "truncation"):
        if s.is_changed(f"data.{name}"):
            why = "offline stages read the columns of known formats and drop rows that are too long"
            fix = "drop the line; `luyen data inspect` shows what is read"
            yield Finding(field=f"data.{name}", why=why, fix=fix)


@rule("Y10", "note")
def keys_belong_to_the_stage(s: Situation) -> Iterator[Finding]:
    """Keys about rollouts, rewards and credit are changed only where a run has them."""
    stage = s.config.trainer.stage
    if stage == "rl":
        return
    changed = [path for path in sorted(s.written) if s.is_changed(path) and is_unread(path, stage)]
    for block in dict.fromkeys(_block_of(path) for path in changed):
        paths = [path for path in changed if _block_of(path) == block]
        others = f" (nor {', '.join(paths[1:])})" if len(paths) > 1 else ""
        why = f"the stage `{stage}` does not read it{others}: it has no effect"
        fix = "drop it, or leave it if other stages share the file"
        yield Finding(field=paths[0], why=why, fix=fix)


@rule("Y06", "error")
def supervised_loss_is_known(s: Situation) -> Iterator[Finding]:
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
    if path.startswith(_READ) or path in _READ_BY.get(stage, ()):
        return False
    return path.startswith(_ONLINE)


def _block_of(path: str) -> str:
    """The part of the run that a key is about."""
    names = path.split(".")
    return ".".join(names[: 2 if names[0] == "actor_rollout_ref" else 1])


def _reads_preference(s: Situation) -> bool:
    trainer, algorithm = s.config.trainer, s.config.algorithm
    if trainer.stage == "rl":
        return algorithm.adv_estimator == _PREFERENCE_ESTIMATOR
    return trainer.stage == "preference"


def _facts(s: Situation) -> list[PreferenceFacts]:
    """Facts of the chosen losses that are known."""
    known = s.known.preference_losses
    return [known[name] for name in s.config.preference.loss_type if name in known]
