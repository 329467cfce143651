"""Actor, rollout engine, reference and critic, made from a configuration."""

from collections.abc import Callable
from functools import partial

import torch

import luyen.rollout.engines
from luyen.config.architectures import most_positions
from luyen.config.plan import is_swapping, versions_held
from luyen.config.programs import offers_programs
from luyen.config.schema.actor import Actor
from luyen.config.schema.rollout import LogProbBatching
from luyen.config.schema.run import RunConfig
from luyen.data.render import Renderer
from luyen.data.tokenizer import Tokenizer
from luyen.engine.actor import ActorEngine
from luyen.engine.critic import CriticEngine
from luyen.engine.optim import MasterAdamW
from luyen.engine.passes import Passes
from luyen.models.load import load_policy
from luyen.models.policy import Policy
from luyen.models.threads import choose_threads
from luyen.models.value import ValueModel
from luyen.rollout.build import Surroundings, build_conversations, build_surroundings
from luyen.rollout.foreign_engine import built_engine
from luyen.rollout.protocol import RolloutEngine, rollout_engines
from luyen.rollout.resident import ResidentEngines
from luyen.runtime.generation import Generation
from luyen.runtime.local import LocalRoles
from luyen.sandbox.limits import demand
from luyen.train.needs import Needs
from luyen.train.teacher import load_teacher

ENGINES = luyen.rollout.engines
"""Importing it registers the engines that come with the package."""


def surroundings_of(config: RunConfig) -> Surroundings | None:
    """Tools and worlds of a run; None where every rollout is one answer."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    if offers_programs(config):
        demand(config.sandbox.require)
    return build_surroundings(multi_turn) if multi_turn.enable else None


def build_roles(
    config: RunConfig,
    renderer: Renderer,
    tokenizer: Tokenizer,
    needs: Needs,
    device: str,
    *,
    surroundings: Surroundings | None = None,
    runs_ahead: bool = False,
) -> LocalRoles:
    """Actor, rollout engine, reference and critic on one device.

    With `runs_ahead` generation goes on while the actor learns, as `trainer` says.
    """
    arr = config.actor_rollout_ref
    policy = start_policy(config, tokenizer, device)
    choose_threads(policy)
    actor, rollout = arr.actor, arr.rollout
    return LocalRoles(
        actor=ActorEngine(
            policy,
            MasterAdamW(policy.parameters(), actor.optim),
            actor_passes(actor),
            temperature=rollout.temperature,
        ),
        rollout=resident_engines(config, policy, tokenizer, device)
        if runs_ahead
        else build_engine(config, policy, tokenizer),
        generation=generation_of(config, surroundings, renderer),
        reference=build_reference(config, tokenizer, needs, device),
        critic=build_critic(config, tokenizer, device) if needs.values else None,
        log_prob_passes=log_prob_passes(rollout, actor),
        ref_passes=log_prob_passes(arr.ref, actor),
        frees_cache=rollout.free_cache_engine,
        is_swapping=is_swapping(config.trainer),
        teacher=load_teacher(config, tokenizer, device) if needs.teacher else None,
    )


def start_policy(config: RunConfig, tokenizer: Tokenizer, device: str) -> Policy:
    """The policy as a run starts with it."""
    return load_policy(
        config.actor_rollout_ref.model,
        device=device,
        vocabulary=tokenizer.size,
        seed=config.trainer.seed,
        may_be_plain=may_be_plain(config),
    )


def may_be_plain(config: RunConfig) -> bool:
    """Whether a model that cannot be packed may run: wherever `native` does not have to draw."""
    return config.actor_rollout_ref.rollout.name == "hf" or config.trainer.stage != "rl"


def build_engine(
    config: RunConfig, policy: Policy, tokenizer: Tokenizer, *, sharing: int = 1
) -> RolloutEngine:
    """The engine that generates with these weights; so many share the memory of a device.

    A model that cannot be packed, of a checkpoint or an offline stage, is drawn from by `hf`.
    """
    data, rollout = config.data, config.actor_rollout_ref.rollout
    longest = data.max_prompt_length + data.max_response_length
    most = most_positions(config.actor_rollout_ref.model)
    if most is not None:
        rollout = rollout.model_copy(
            update={"max_model_len": min(rollout.max_model_len or longest, most)}
        )
    share = {"gpu_memory_utilization": rollout.gpu_memory_utilization / sharing}
    rollout = rollout.model_copy(update=share)
    is_plain = rollout.name == "native" and not policy.is_packed
    name = "hf" if is_plain else rollout.name
    make = rollout_engines.get(name)
    # Stop strings may be, or contain, special tokens.
    decode = partial(tokenizer.decode, skip_special=False)
    return built_engine(
        name,
        lambda: make(policy, rollout, longest=longest, decode=decode),
        vocabulary=policy.head.vocabulary,
    )


def resident_engines(
    config: RunConfig, policy: Policy, tokenizer: Tokenizer, device: str
) -> ResidentEngines:
    """Engines for every version of the weights that may be needed at a time.

    Each has parameters of its own, but those that never learn are the policy's.
    """
    frozen = {name: p for name, p in policy.named_parameters() if not p.requires_grad}

    def make() -> RolloutEngine:
        copied = start_policy(config, tokenizer, device)
        for name, parameter in copied.named_parameters():
            if name in frozen:
                parameter.data = frozen[name].data
        return build_engine(config, copied, tokenizer, sharing=versions)

    versions = versions_held(config.trainer)
    return ResidentEngines(make, versions=versions)


def build_reference(
    config: RunConfig, tokenizer: Tokenizer, needs: Needs, device: str
) -> Policy | None:
    """The reference policy; None where none is needed, or the actor without its adapter is it."""
    if not needs.reference or config.actor_rollout_ref.model.lora_rank > 0:
        return None
    return frozen_policy(config, tokenizer, device)


def frozen_policy(config: RunConfig, tokenizer: Tokenizer, device: str) -> Policy:
    """What the policy is compared with: `ref.path`, or the policy as it starts; it never learns."""
    arr = config.actor_rollout_ref
    reference = _other_weights(
        config, arr.ref.path, tokenizer, device, "actor_rollout_ref.ref.path"
    )
    reference.requires_grad_(False)
    reference.is_exact = arr.rollout.deterministic
    return reference


def generation_of(
    config: RunConfig, surroundings: Surroundings | None, renderer: Renderer
) -> Generation:
    """How rollouts are made: conversations of several turns where there are `surroundings`."""
    conversations = None
    if surroundings is not None:
        conversations = build_conversations(
            config.actor_rollout_ref.rollout.multi_turn,
            surroundings,
            renderer=renderer,
            max_prompt_length=config.data.max_prompt_length,
            max_response_length=config.data.max_response_length,
        )
    return Generation(renderer=renderer, seed=config.trainer.seed, conversations=conversations)


def actor_passes(actor: Actor) -> Passes:
    """How the actor's update is cut into micro-batches."""
    if actor.use_dynamic_bsz:
        return Passes(max_tokens=actor.ppo_max_token_len_per_gpu)
    return Passes(sequences=actor.ppo_micro_batch_size_per_gpu or 1)


def log_prob_passes(block: LogProbBatching, actor: Actor) -> Passes:
    """How a pass without gradients is cut: as asked, or as the actor's update."""
    asked = block.log_prob_use_dynamic_bsz
    if actor.use_dynamic_bsz if asked is None else asked:
        budget = block.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
        return Passes(max_tokens=budget)
    size = block.log_prob_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu
    return Passes(sequences=size or 1)


def _other_weights(
    config: RunConfig, path: str | None, tokenizer: Tokenizer, device: str, field: str
) -> Policy:
    """The policy as it starts, or the weights at `path` that `field` names, never fresh ones."""
    model = config.actor_rollout_ref.model
    if path is not None:
        model = model.model_copy(update={"init": "pretrained"})
    return load_policy(
        model,
        path=path or model.path,
        device=device,
        vocabulary=tokenizer.size,
        seed=config.trainer.seed,
        may_be_plain=may_be_plain(config),
        field=field if path is not None else "actor_rollout_ref.model.path",
    )


def critic_passes(config: RunConfig) -> Passes:
    """How values and the critic's update are cut: as asked, or as the actor's update."""
    critic, actor = config.critic, config.actor_rollout_ref.actor
    dynamic = actor.use_dynamic_bsz if critic.use_dynamic_bsz is None else critic.use_dynamic_bsz
    if dynamic:
        budget = critic.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
        return Passes(max_tokens=budget)
    size = critic.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu or 1
    return Passes(sequences=size)


def value_aggregation(config: RunConfig) -> str:
    """How the value losses of tokens become one number."""
    actor = config.actor_rollout_ref.actor
    return config.critic.loss_agg_mode or actor.loss_agg_mode or "token-mean"


def build_critic(
    config: RunConfig,
    tokenizer: Tokenizer,
    device: str,
    *,
    sharded: Callable[[ValueModel], None] | None = None,
    here: torch.device | None = None,
) -> CriticEngine:
    """The critic; `sharded` shards its model first, and `here` is where its passes run."""
    critic, actor = config.critic, config.actor_rollout_ref.actor
    weights = _other_weights(config, critic.model.path, tokenizer, device, "critic.model.path")
    weights.is_exact = config.actor_rollout_ref.rollout.deterministic
    value = ValueModel(weights)
    if sharded is not None:
        sharded(value)
    return CriticEngine(
        value,
        MasterAdamW(value.parameters(), critic.optim),
        critic_passes(config),
        cliprange_value=critic.cliprange_value,
        aggregation=value_aggregation(config),
        loss_scale_factor=actor.loss_scale_factor or float(config.data.max_response_length),
        device=here,
    )
