"""H: a teacher, and what the student learns from it."""

from collections.abc import Iterator

from luyen.config.rules.rule import Finding, Situation, rule
from luyen.config.signals import has_teacher, is_teacher_alone

_GIVEN = ("divergence", "beta", "top_k", "temperature", "nll_weight")
"""Keys that act on given answers, in `trainer.stage: distill`."""


@rule("H01", "error")
def teacher_is_named(s: Situation) -> Iterator[Finding]:
    """A run that learns from a teacher names it."""
    if has_teacher(s.config) and s.config.distill.teacher_path is None:
        yield Finding(
            field="distill.teacher_path",
            why="the student has nobody to learn from",
            fix="set it to a model directory, a hub id or a `builtin://` name",
        )


@rule("H02", "error")
def own_samples_belong_to_rl(s: Situation) -> Iterator[Finding]:
    """Learning from a teacher on the student's own samples is `trainer.stage: rl`."""
    stage = s.config.trainer.stage
    if s.config.distill.on_policy and stage != "rl":
        why = f"the stage `{stage}` learns on the rows that are given, and samples nothing"
        fix = "set trainer.stage=rl, or drop it"
        yield Finding(field="distill.on_policy", why=why, fix=fix)


@rule("H03", "warning")
def teacher_knob_has_effect(s: Situation) -> Iterator[Finding]:
    """Keys of `distill` are changed only where they are read."""
    distill, stage = s.config.distill, s.config.trainer.stage
    unread: dict[str, str] = {}
    if not has_teacher(s.config):
        unread["teacher_path"] = "set trainer.stage=distill, or distill.on_policy=true"
    if stage != "distill":
        unread |= dict.fromkeys(_GIVEN, "set trainer.stage=distill")
    elif distill.divergence != "jsd":
        unread["beta"] = "set distill.divergence=jsd"
    if stage == "distill" and distill.divergence != "topk_forward_kl":
        unread["top_k"] = "set distill.divergence=topk_forward_kl"
    if stage != "rl" or not distill.on_policy:
        unread["task_weight"] = "set trainer.stage=rl and distill.on_policy=true"
    for name, fix in unread.items():
        if s.is_changed(f"distill.{name}"):
            why = "it has no effect as things stand"
            yield Finding(field=f"distill.{name}", why=why, fix=f"drop it, or {fix}")


@rule("H04", "error")
def nothing_asks_for_absent_rewards(s: Situation) -> Iterator[Finding]:
    """Where the teacher alone decides, nothing else needs the rewards of samples."""
    config = s.config
    if not is_teacher_alone(config):
        return
    sampler = config.data.sampler
    asking = {
        "algorithm.filter_groups.enable": config.algorithm.filter_groups.enable,
        "algorithm.use_kl_in_reward": config.algorithm.use_kl_in_reward,
        "critic.enable": bool(config.critic.enable),
        "data.sampler.name": sampler.class_path is None and sampler.name == "curriculum",
    }
    for field, is_on in asking.items():
        if is_on:
            why = "distill.task_weight is 0: no sample gets a reward"
            yield Finding(field=field, why=why, fix="drop it, or set distill.task_weight")


@rule("H05", "warning")
def estimator_is_asked(s: Situation) -> Iterator[Finding]:
    """An advantage estimator is chosen only where rewards are among what is learned from."""
    if is_teacher_alone(s.config) and s.is_changed("algorithm.adv_estimator"):
        yield Finding(
            field="algorithm.adv_estimator",
            why="distill.task_weight is 0, so it has no effect",
            fix="drop it, or set distill.task_weight",
        )
