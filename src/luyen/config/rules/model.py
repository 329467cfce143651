"""M: the policy's weights, adapters and optimizer."""

from collections.abc import Iterator

from luyen.config.architectures import brings_code, most_positions, plain_type
from luyen.config.rules.rule import Finding, Situation, rule

_MODEL = "actor_rollout_ref.model"


@rule("M08", "error")
def fast_path_runs_the_model(s: Situation) -> Iterator[Finding]:
    """A model that only transformers runs is drawn from by `hf`, and is not sharded."""
    model, rollout = s.config.actor_rollout_ref.model, s.config.actor_rollout_ref.rollout
    kind = plain_type(model)
    if kind is None:
        return
    if s.config.trainer.stage == "rl" and rollout.name == "native":
        yield Finding(
            field="actor_rollout_ref.rollout.name",
            why=f"sequences of a {kind} model cannot be packed, which `native` needs",
            fix="set it to hf: slower, through transformers itself",
        )
    if s.where.world_size > 1:
        yield Finding(
            field="trainer.n_gpus_per_node",
            why=f"transformers itself runs a {kind} model, which is not sharded",
            fix="train it on one device",
        )


@rule("M09", "note")
def plain_path_is_chosen(s: Situation) -> Iterator[Finding]:
    """What is run by transformers itself, or by code that a model brings, is said."""
    model, rollout = s.config.actor_rollout_ref.model, s.config.actor_rollout_ref.rollout
    kind = plain_type(model)
    if kind is not None and (rollout.name == "hf" or s.config.trainer.stage != "rl"):
        yield Finding(
            field=f"{_MODEL}.path",
            why=f"transformers itself runs a {kind} model: padded, slower, its memory not planned",
            fix="take another architecture where speed matters",
        )
    elif kind is None and brings_code(model):
        yield Finding(
            field=f"{_MODEL}.path",
            why="the model brings its own code: whether its sequences can be packed shows when it "
            "is loaded, and memory is planned as for a decoder of its sizes, where it names them",
            fix="if it cannot be packed, set actor_rollout_ref.rollout.name=hf",
        )


@rule("M10", "error")
def sequences_have_positions(s: Situation) -> Iterator[Finding]:
    """A model that learned its positions has one for each token of the longest sequence."""
    most, longest = most_positions(s.config.actor_rollout_ref.model), s.batch.longest_sequence
    if most is not None and longest > most:
        yield Finding(
            field="data.max_response_length",
            why=f"sequences may have {longest} tokens, and the model learned {most} positions",
            fix=f"lower it and data.max_prompt_length to {most} together",
        )


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


@rule("M05", "note")
def warm_up_ends(s: Situation) -> Iterator[Finding]:
    """Warm-up is no longer than the run; otherwise it is shortened to end with it."""
    steps = s.config.trainer.total_training_steps
    for side, optim in (
        ("actor_rollout_ref.actor", s.config.actor_rollout_ref.actor.optim),
        ("critic", s.config.critic.optim),
    ):
        if steps is not None and optim.lr_warmup_steps > steps:
            yield Finding(
                field=f"{side}.optim.lr_warmup_steps",
                why=f"it would not end in a run of {steps} steps: shortened to {steps}",
                fix=f"set it to at most {steps}",
            )


@rule("M11", "error")
def warm_up_is_given_once(s: Situation) -> Iterator[Finding]:
    """Warm-up is given in steps or as a ratio, not as both."""
    for side, optim in (
        ("actor_rollout_ref.actor", s.config.actor_rollout_ref.actor.optim),
        ("critic", s.config.critic.optim),
    ):
        if optim.lr_warmup_steps >= 0 and optim.lr_warmup_steps_ratio > 0:
            yield Finding(
                field=f"{side}.optim.lr_warmup_steps_ratio",
                why=f"lr_warmup_steps={optim.lr_warmup_steps} decides; the ratio has no effect",
                fix="keep one of the two",
            )


@rule("M13", "error")
def moments_decay(s: Situation) -> Iterator[Finding]:
    """AdamW's moments decay: each of its two numbers is at least 0 and below 1."""
    for side, optim in (
        ("actor_rollout_ref.actor", s.config.actor_rollout_ref.actor.optim),
        ("critic", s.config.critic.optim),
    ):
        if not all(0 <= beta < 1 for beta in optim.betas):
            why = "a share of the old moment that is kept is at least 0 and below 1"
            yield Finding(field=f"{side}.optim.betas", why=why, fix="set it to [0.9, 0.999]")
