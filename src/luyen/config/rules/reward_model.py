"""E, and D07, D08, Y08, Y09: reward models: devices, limits and training."""

from collections.abc import Iterator
from typing import Any, cast

from luyen.config.model_folder.config_json import read_raw
from luyen.config.plan import count_reward_replicas, reward_pool
from luyen.config.rules.rule import Finding, RuleContext, rule
from luyen.config.schema.model import ModelConfig

_MODEL = "reward.reward_model"
_TRAINED = "actor_rollout_ref.model"
_KEYS = (
    "enable_resource_pool",
    "nnodes",
    "n_gpus_per_node",
    "model_path",
    "steps",
    "param_offload",
    "rollout.data_parallel_size",
    "rollout.max_num_batched_tokens",
    "rollout.max_num_seqs",
    "rollout.max_model_len",
)
_READ_BY = {
    "center_rewards_coefficient": "bradley_terry",
    "use_margins": "bradley_terry",
    "target_key": "regression",
}
"""Key of `reward_training` -> the objective that reads it."""


@rule("D07", "error")
def reward_model_is_complete(s: RuleContext) -> Iterator[Finding]:
    """A reward model that is on has weights; a pool of its own has devices."""
    reward_model = s.config.reward.reward_model
    pool = reward_model.nnodes * reward_model.n_gpus_per_node
    if reward_model.enable and reward_model.model_path is None:
        why = "the reward model is on and no weights are named"
        yield Finding(field=f"{_MODEL}.model_path", why=why, fix="set a model directory")
    elif reward_model.enable and reward_model.model_path is not None:
        yield from _no_scorer(reward_model.model_path)
    if reward_model.enable_resource_pool and pool == 0:
        yield Finding(
            field=f"{_MODEL}.enable_resource_pool",
            why=f"nnodes {reward_model.nnodes} x n_gpus_per_node {reward_model.n_gpus_per_node} "
            "gives the pool no device",
            fix=f"set {_MODEL}.nnodes and n_gpus_per_node, or share the devices of training",
        )


def _no_scorer(path: str) -> Iterator[Finding]:
    """A finding where a model's config on this machine says that it was saved as another kind."""
    raw = read_raw(ModelConfig(path=path)) or {}
    saved: Any = raw.get("architectures")
    kinds = [str(kind) for kind in cast(list[Any], saved)] if isinstance(saved, list) else []
    if kinds and not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        yield Finding(
            field=f"{_MODEL}.model_path",
            why=f"it is no reward model but {', '.join(kinds)}",
            fix="train one from it with trainer.stage=reward_model, or give a model saved as "
            "AutoModelForSequenceClassification with one label",
        )


@rule("D08", "warning")
def reward_model_key_has_effect(s: RuleContext) -> Iterator[Finding]:
    """Keys of the reward model are changed only if it is on, in a stage that uses rewards."""
    reward_model, stage = s.config.reward.reward_model, s.config.trainer.stage
    if reward_model.enable and stage != "rl":
        why = f"the stage `{stage}` learns from given rows and uses no reward"
        yield Finding(field=f"{_MODEL}.enable", why=why, fix="set it to false")
    if reward_model.enable:
        return
    for name in _KEYS:
        if s.is_changed(f"{_MODEL}.{name}"):
            why = f"{_MODEL}.enable is false, so it has no effect"
            fix = f"drop it, or set {_MODEL}.enable=true"
            yield Finding(field=f"{_MODEL}.{name}", why=why, fix=fix)


@rule("E01", "error")
def pool_of_the_reward_model_needs_processes(s: RuleContext) -> Iterator[Finding]:
    """A separate pool of the reward model needs the Ray runtime."""
    pool = reward_pool(s.config)
    if pool is not None and s.where.runtime == "local":
        yield Finding(
            field=f"{_MODEL}.enable_resource_pool",
            why=f"{pool[0]} x {pool[1]} devices are set aside for the reward model, and "
            "trainer.runtime=local is one process on one device",
            fix="set trainer.runtime to ray or auto, or it to false",
        )


@rule("E02", "error")
def copies_of_the_reward_model_fit(s: RuleContext) -> Iterator[Finding]:
    """The copies of the reward model, one on a device, fit the devices that it has."""
    if not s.config.reward.reward_model.enable or s.config.trainer.stage != "rl":
        return
    copies, pool = count_reward_replicas(s.config), reward_pool(s.config)
    there = pool[0] * pool[1] if pool is not None else s.where.world_size
    if copies > max(1, there):
        words = "of its own pool" if pool is not None else "that train, which it shares"
        yield Finding(
            field=f"{_MODEL}.rollout.data_parallel_size",
            why=f"{copies} copies, and {there} devices {words}",
            fix="drop the line: every device then has a copy",
        )


@rule("E03", "error")
def conversations_fit_the_reward_model(s: RuleContext) -> Iterator[Finding]:
    """What the policy may say fits into what the reward model may read."""
    reward_model = s.config.reward.reward_model
    if not reward_model.enable or s.config.trainer.stage != "rl":
        return
    longest = s.batch.longest_sequence
    limits = {
        "max_num_batched_tokens": reward_model.rollout.max_num_batched_tokens,
        "max_model_len": reward_model.rollout.max_model_len,
    }
    for name, limit in limits.items():
        if limit is not None and limit < longest:
            yield Finding(
                field=f"{_MODEL}.rollout.{name}",
                why=f"a conversation may have {longest} tokens (data.max_prompt_length + "
                "max_response_length), and one that is too long has no score",
                fix=f"set it to at least {longest}, and more where its template is longer",
            )


@rule("E04", "warning")
def keys_of_its_devices_have_an_effect(s: RuleContext) -> Iterator[Finding]:
    """Keys about the reward model's devices are changed only where they are read."""
    reward_model = s.config.reward.reward_model
    if not reward_model.enable:
        return
    for name in ("nnodes", "n_gpus_per_node"):
        if not reward_model.enable_resource_pool and s.is_changed(f"{_MODEL}.{name}"):
            why = "the reward model shares the devices that train: it has no pool of its own"
            fix = f"drop the line, or set {_MODEL}.enable_resource_pool=true"
            yield Finding(field=f"{_MODEL}.{name}", why=why, fix=fix)
    if s.where.device == "cpu" and reward_model.param_offload:
        why = "without a GPU its weights are in main memory anyway"
        yield Finding(field=f"{_MODEL}.param_offload", why=why, fix="drop the line")


@rule("Y08", "error")
def adapter_of_a_reward_model_fits(s: RuleContext) -> Iterator[Finding]:
    """An adapter of a reward model leaves the score head to training, over whole weights."""
    model = s.config.actor_rollout_ref.model
    if s.config.trainer.stage != "reward_model" or model.lora_rank == 0:
        return
    if model.quantization != "none":
        why = "the weights of a reward model are not quantised"
        yield Finding(field=f"{_TRAINED}.quantization", why=why, fix="set it to none")
    if "score" in model.target_modules:
        why = "the score head is trained whole, and has no adapter"
        yield Finding(field=f"{_TRAINED}.target_modules", why=why, fix="leave `score` out")


@rule("Y09", "warning")
def reward_training_keys_are_read(s: RuleContext) -> Iterator[Finding]:
    """A key of `reward_training` is changed only where the chosen objective reads it."""
    objective = s.config.reward_training.objective
    if s.config.trainer.stage != "reward_model":
        return
    for name, reader in _READ_BY.items():
        if objective != reader and s.is_changed(f"reward_training.{name}"):
            why = f"the objective is `{objective}`, and only `{reader}` reads it"
            yield Finding(field=f"reward_training.{name}", why=why, fix="drop the line")
