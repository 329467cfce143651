"""M: the policy's weights, adapters and optimizer."""

from collections.abc import Iterator

from luyen.base.paths import is_directory
from luyen.base.suggest import did_you_mean
from luyen.config.model_shape import builtin_models
from luyen.config.rules.rule import Finding, Situation, rule

_MODEL = "actor_rollout_ref.model"


@rule("M01", "error")
def model_exists(s: Situation) -> Iterator[Finding]:
    """Paths of models, tokenizers and adapters that look local are there."""
    model, critic, ref = (
        s.config.actor_rollout_ref.model,
        s.config.critic,
        s.config.actor_rollout_ref.ref,
    )
    paths = {
        f"{_MODEL}.path": model.path,
        f"{_MODEL}.tokenizer_path": model.tokenizer_path,
        f"{_MODEL}.lora_adapter_path": model.lora_adapter_path,
        "critic.model.path": critic.model.path,
        "actor_rollout_ref.ref.path": ref.path,
        "distill.teacher_path": s.config.distill.teacher_path,
        "reward.reward_model.model_path": s.config.reward.reward_model.model_path,
    }
    for field, path in paths.items():
        if path is None:
            continue
        if path.startswith("builtin://"):
            if path.removeprefix("builtin://") not in builtin_models():
                names = [f"builtin://{name}" for name in builtin_models()]
                yield Finding(field=field, why="no such model ships", fix=did_you_mean(path, names))
        elif _looks_local(path) and not is_directory(path):
            yield Finding(
                field=field,
                why="no such directory on this machine",
                fix="give a model directory, a hub id such as org/name, or builtin://arithmetic",
            )


def _looks_local(path: str) -> bool:
    """A hub id is `name` or `org/name`; everything else is a path."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


@rule("M02", "warning")
def model_is_chosen(s: Situation) -> Iterator[Finding]:
    """A run on rows of your own names a model of your own."""
    model, data = s.config.actor_rollout_ref.model, s.config.data
    own = [path for path in data.train_files if "://" not in path]
    if own and model.path.startswith("builtin://") and f"{_MODEL}.path" not in s.written:
        yield Finding(
            field=f"{_MODEL}.path",
            why=f"no model is named, so the small built-in one would train on {own[0]}",
            fix="set it to a model directory or a hub id",
        )


@rule("M03", "warning")
def adapter_knob_has_effect(s: Situation) -> Iterator[Finding]:
    """Adapter keys are changed only when there is an adapter."""
    model = s.config.actor_rollout_ref.model
    read = {
        "lora_alpha": model.lora_alpha,
        "target_modules": model.target_modules,
        "lora_adapter_path": model.lora_adapter_path,
    }
    for name in read:
        if model.lora_rank == 0 and s.is_changed(f"{_MODEL}.{name}"):
            yield Finding(
                field=f"{_MODEL}.{name}",
                why="lora_rank=0 trains all weights, so it has no effect",
                fix=f"set {_MODEL}.lora_rank, or drop it",
            )


@rule("M04", "warning")
def learning_rate_fits(s: Situation) -> Iterator[Finding]:
    """Learning rates learn: above 0, not wild, and higher for adapters."""
    actor, critic = s.config.actor_rollout_ref.actor, s.config.critic
    for field, optim in (
        ("actor_rollout_ref.actor.optim.lr", actor.optim),
        ("critic.optim.lr", critic.optim),
    ):
        if optim.lr == 0:
            yield Finding(field=field, why="nothing is learned at 0", fix="set a rate > 0")
        elif optim.lr > 0.01:
            why = f"{optim.lr} is far above what fine-tuning survives"
            yield Finding(field=field, why=why, fix="start at 1e-6 (all weights) or 1e-5 (LoRA)")
    rank = s.config.actor_rollout_ref.model.lora_rank
    if rank > 0 and 0 < actor.optim.lr < 3e-6:
        yield Finding(
            field="actor_rollout_ref.actor.optim.lr",
            why=f"an adapter of rank {rank} learns about ten times slower than all weights",
            fix="set about 1e-5",
        )


@rule("M05", "error")
def warm_up_ends(s: Situation) -> Iterator[Finding]:
    """Warm-up is shorter than the run, and given once."""
    steps = s.config.trainer.total_training_steps
    for side, optim in (
        ("actor_rollout_ref.actor", s.config.actor_rollout_ref.actor.optim),
        ("critic", s.config.critic.optim),
    ):
        if steps is not None and optim.lr_warmup_steps >= steps:
            yield Finding(
                field=f"{side}.optim.lr_warmup_steps",
                why=f"warm-up never ends in a run of {steps} steps",
                fix=f"set it below {steps}",
            )
        if optim.lr_warmup_steps >= 0 and optim.lr_warmup_steps_ratio > 0:
            yield Finding(
                field=f"{side}.optim.lr_warmup_steps_ratio",
                why=f"lr_warmup_steps={optim.lr_warmup_steps} decides; the ratio has no effect",
                fix="keep one of the two",
            )
