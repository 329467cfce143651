"""J: samples that are paired and compared as preferences, inside the RL loop."""

from collections.abc import Iterator

from luyen.config.catalog import PREFERENCE_LOSSES
from luyen.config.plan import loss_in_force
from luyen.config.rules.rule import Finding, Situation, rule
from luyen.config.signals import ONLINE_PAIRS, makes_pairs, pairs_need_reference

_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"
_PREFERENCE = "preference"
_ROWS_ONLY = ("use_margins", "reference")
"""Keys that concern rows of pairs."""


@rule("J01", "error")
def pairs_make_one_step(s: Situation) -> Iterator[Finding]:
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
def loss_compares_pairs(s: Situation) -> Iterator[Finding]:
    """Sampled pairs are compared by losses over pairs, with the reference that those need."""
    if not makes_pairs(s.config):
        return
    for name in s.config.preference.loss_type:
        facts = PREFERENCE_LOSSES.get(name)
        if facts is not None and facts.kind != "pair":
            why = f"`{name}` judges marked answers, and samples are compared in pairs"
            fix = "choose a loss over pairs, such as sigmoid"
            yield Finding(field=f"{_PREFERENCE}.loss_type", why=why, fix=fix)
    if pairs_need_reference(s.config) and s.config.actor_rollout_ref.ref.enable is False:
        why = f"`{ONLINE_PAIRS}` compares the policy with a reference"
        fix = "drop the line, or choose a loss without one, such as simpo"
        yield Finding(field="actor_rollout_ref.ref.enable", why=why, fix=fix)


@rule("J03", "warning")
def key_of_rows_has_effect(s: Situation) -> Iterator[Finding]:
    """Keys that concern rows of pairs are not changed where pairs are sampled."""
    for name in _ROWS_ONLY:
        field = f"{_PREFERENCE}.{name}"
        if makes_pairs(s.config) and s.is_changed(field):
            why = "pairs are sampled, and no row says it, so it has no effect"
            yield Finding(field=field, why=why, fix="drop the line")
