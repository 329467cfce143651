"""What a run will do: batch arithmetic, training signals, roles, and their placement."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, TypeAlias, final

from luyen.config.catalog import (
    PREFERENCE_LOSSES,
    ROLLOUT_ENGINES,
    EstimatorFacts,
    LossFacts,
    PreferenceFacts,
    training_engine,
)
from luyen.config.machine import Machine
from luyen.config.schema.algorithm import PreferenceConfig
from luyen.config.schema.run import RunConfig
from luyen.config.schema.trainer import TrainerConfig

# Training signals besides rewards: a teacher, or pairs of the run's own samples.

PreferenceLosses: TypeAlias = Mapping[str, PreferenceFacts]
"""Losses of preferences by name, with what must be known about each."""
ONLINE_PAIRS = "online_dpo"
"""The estimator that pairs the samples of a prompt."""


def has_teacher(config: RunConfig) -> bool:
    """Whether the run keeps a teacher, for given answers or for those of the student."""
    stage, distill = config.trainer.stage, config.distill
    return stage == "distill" or (stage == "rl" and distill.on_policy)


def is_pure_distillation(config: RunConfig) -> bool:
    """Whether an online run learns from its teacher and from no reward."""
    distill = config.distill
    return config.trainer.stage == "rl" and distill.on_policy and distill.task_weight == 0


def makes_pairs(config: RunConfig) -> bool:
    """Whether samples of a prompt are paired, best with worst, and compared as preferences."""
    is_judged = config.trainer.stage == "rl" and not is_pure_distillation(config)
    return is_judged and config.algorithm.adv_estimator == ONLINE_PAIRS


def pairs_need_reference(config: RunConfig) -> bool:
    """Whether such pairs are compared with a reference."""
    losses = (PREFERENCE_LOSSES.get(name) for name in config.preference.loss_type)
    return makes_pairs(config) and any(facts is None or facts.reference for facts in losses)


def sequences_of_a_row(config: RunConfig, losses: PreferenceLosses) -> int:
    """Sequences that learn from one row of an offline stage: two of a pair, one of any other."""
    stage = config.trainer.stage
    if stage == "reward_model":
        return 2 if config.reward_training.objective == "bradley_terry" else 1
    if stage != "preference":
        return 1
    facts = losses.get(next(iter(config.preference.loss_type), ""))
    return 1 if facts is not None and facts.kind == "unpaired" else 2


def rows_need_reference(config: RunConfig) -> bool:
    """Whether a preference stage keeps a reference model in memory during training."""
    if config.trainer.stage != "preference" or config.preference.reference != "live":
        return False
    losses = (PREFERENCE_LOSSES.get(name) for name in config.preference.loss_type)
    return any(facts is None or facts.reference for facts in losses)


def ranks_per_sequence(config: RunConfig) -> int:
    """Ranks that divide the tokens of each sequence (sequence parallelism)."""
    return config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size


def ranks_per_shard(config: RunConfig) -> int:
    """Ranks that compute the same part of a batch: they divide its tokens, or the layers."""
    fsdp_config = config.actor_rollout_ref.actor.fsdp_config
    return ranks_per_sequence(config) * fsdp_config.tensor_parallel_size


EMBEDDED_ENGINES = ("native", "hf")
"""Rollout engines in processes of the run, which compute with the trainer's own layers."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """From prompts to optimizer steps.

    Example:
        >>> plan = plan_batches(RunConfig(), world_size=1)
        >>> plan.rollouts, plan.mini_batches, plan.optimizer_steps
        (1024, 1, 1)
    """

    prompts: int
    """Prompts of one step."""
    samples_per_prompt: int
    """Rollouts of each prompt."""
    rollouts: int
    """Rollouts of one step."""
    mini_batches: int
    """Parts of a step that each end in an optimizer step."""
    mini_batch_rollouts: int
    """Rollouts of one optimizer step, over all devices."""
    ranks_per_sequence: int
    """Devices that divide the tokens of each sequence (sequence parallelism)."""
    ranks_per_shard: int
    """Devices that compute the same part of a batch."""
    device_rollouts: int
    """Rollouts of one optimizer step on such devices, rounded up."""
    longest_sequence: int
    """Most tokens of one sequence."""
    micro_batch_tokens: int
    """Most tokens of one forward pass, over the devices that share it."""
    micro_batches: int
    """Forward passes of one optimizer step on one device, at the longest sequences."""
    epochs: int
    """Passes over the samples of a step."""
    optimizer_steps: int
    """Optimizer steps of one step."""
    tokens: int
    """Tokens of one step, at the longest sequences."""
    computed_tokens: int
    """The same with a prompt counted once for all its samples, as the model computes it."""
    total_steps: int | None
    """Steps of the run, when the configuration alone decides it."""


def plan_batches(
    config: RunConfig, *, world_size: int, losses: PreferenceLosses = PREFERENCE_LOSSES
) -> BatchPlan:
    """The arithmetic of one step; divisions that do not come out are the rules' business.

    `losses` of preferences are those that the run can choose from, plugins included.
    """
    data, arr, rows = config.data, config.actor_rollout_ref, config.data.train_batch_size
    actor, rollout = arr.actor, arr.rollout
    # An offline step is one optimizer step on its rows.
    is_offline = config.trainer.stage != "rl"
    samples = sequences_of_a_row(config, losses) if is_offline else rollout.n
    prompts = rows if is_offline else actor.ppo_mini_batch_size
    rollouts, per_mini = rows * samples, min(prompts, rows) * samples
    mini_batches = max(1, rows // prompts)
    longest = data.max_prompt_length + data.max_response_length
    together, shared = ranks_per_sequence(config), ranks_per_shard(config)
    per_device = ceil(per_mini / max(1, world_size // shared))
    if actor.use_dynamic_bsz:
        budget = together * actor.ppo_max_token_len_per_gpu
        tokens = min(budget, per_device * longest)
        micro_batches = ceil(per_device / max(1, budget // longest))
    else:
        sequences = min(actor.ppo_micro_batch_size_per_gpu or 1, per_device)
        tokens = sequences * longest
        micro_batches = ceil(per_device / sequences)
    return BatchPlan(
        prompts=data.train_batch_size,
        samples_per_prompt=samples,
        rollouts=rollouts,
        mini_batches=mini_batches,
        mini_batch_rollouts=per_mini,
        ranks_per_sequence=together,
        ranks_per_shard=shared,
        device_rollouts=per_device,
        longest_sequence=longest,
        micro_batch_tokens=tokens,
        micro_batches=micro_batches,
        epochs=1 if is_offline else actor.ppo_epochs,
        optimizer_steps=mini_batches * (1 if is_offline else actor.ppo_epochs),
        tokens=rollouts * longest,
        computed_tokens=rows * data.max_prompt_length + rollouts * data.max_response_length,
        total_steps=config.trainer.total_training_steps,
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One part of the run and where it works.

    Example:
        >>> Role(name="actor", engine="single", place="cpu, this process").engine
        'single'
    """

    name: str
    """actor, teacher, rollout, reference, critic or reward model."""
    engine: str
    """What carries it out."""
    place: str
    """Where, in words."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Device, world size, runtime and roles.

    Example:
        >>> plan_placement(RunConfig(), Machine(cpus=2, ram_bytes=1), None).device
        'cpu'
    """

    device: str
    """cpu or cuda."""
    world_size: int
    """Devices that train together."""
    runtime: str
    """local or ray."""
    roles: tuple[Role, ...]
    """Who is there."""
    replicas: int = 1
    """Copies of the rollout engine; offline stages have none."""
    rollout_pool: tuple[int, int] | None = None
    """Machines and devices of each that only generate; None: rollouts share the actor's devices."""
    reference_pool: tuple[int, int] | None = None
    """Machines and devices of each that only the reference has; None: it shares the actor's."""
    critic_pool: tuple[int, int] | None = None
    """Machines and devices of each that only the critic has; None: it shares the actor's."""

    @property
    def rank_groups(self) -> tuple[int, ...]:
        """Devices of each group of training processes: the actor's, then pools of other roles.

        Example:
            >>> where = Placement(
            ...     device="cpu", world_size=4, runtime="ray", roles=(), critic_pool=(1, 2)
            ... )
            >>> where.rank_groups
            (4, 2)
        """
        pools = (self.reference_pool, self.critic_pool)
        return self.world_size, *(pool[0] * pool[1] for pool in pools if pool is not None)


def rollout_pool(config: RunConfig) -> tuple[int, int] | None:
    """Machines, and devices of each, that are the rollout engine's own; None where it has none."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.nnodes == 0 or config.trainer.stage != "rl":
        return None
    return rollout.nnodes, rollout.n_gpus_per_node or config.trainer.n_gpus_per_node


def reference_pool(config: RunConfig) -> tuple[int, int] | None:
    """Machines, and devices of each, that are the reference's own; None where it has none.

    With LoRA the reference is the actor with its adapter off, wherever the actor is.
    """
    ref, lora = config.actor_rollout_ref.ref, config.actor_rollout_ref.model.lora_rank > 0
    is_apart = config.trainer.stage == "rl" and needs_reference(config) and not lora
    if ref.nnodes == 0 or not is_apart:
        return None
    return ref.nnodes, ref.n_gpus_per_node or config.trainer.n_gpus_per_node


def critic_pool(config: RunConfig, estimator: EstimatorFacts | None) -> tuple[int, int] | None:
    """Machines, and devices of each, that are the critic's own; None where it has none."""
    critic, trainer = config.critic, config.trainer
    if critic.nnodes == 0 or trainer.stage != "rl" or not needs_critic(config, estimator):
        return None
    return critic.nnodes, critic.n_gpus_per_node or trainer.n_gpus_per_node


def reward_pool(config: RunConfig) -> tuple[int, int] | None:
    """Machines, and devices of each, that are the reward model's own; None where it has none."""
    reward_model = config.reward.reward_model
    is_used = reward_model.enable and config.trainer.stage == "rl"
    if not (is_used and reward_model.enable_resource_pool):
        return None
    return reward_model.nnodes, reward_model.n_gpus_per_node


def count_reward_replicas(config: RunConfig) -> int:
    """Copies of the reward model: as configured, or one on each device that it has or shares."""
    trainer, reward_model = config.trainer, config.reward.reward_model
    if reward_model.rollout.data_parallel_size is not None:
        return reward_model.rollout.data_parallel_size
    nodes, each = reward_pool(config) or (trainer.nnodes, trainer.n_gpus_per_node)
    return max(1, nodes * each)


def count_replicas(config: RunConfig) -> int:
    """Copies of the rollout engine: as configured, or as many as its devices can hold."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if rollout.data_parallel_size is not None:
        return rollout.data_parallel_size
    nodes, each = rollout_pool(config) or (trainer.nnodes, trainer.n_gpus_per_node)
    return max(1, nodes * each // devices_of_a_copy(config))


def devices_of_a_copy(config: RunConfig) -> int:
    """Devices that one copy of the rollout engine is split over; `hf` does not split."""
    rollout = config.actor_rollout_ref.rollout
    return 1 if rollout.name == "hf" else rollout.tensor_model_parallel_size


def ranks_per_replica(config: RunConfig) -> int:
    """Processes of this run that share one copy of the rollout engine."""
    return devices_of_a_copy(config) if config.actor_rollout_ref.rollout.name == "native" else 1


def starts_servers(config: RunConfig) -> bool:
    """Whether copies of a built-in rollout engine are servers that the run starts."""
    rollout = config.actor_rollout_ref.rollout
    facts = ROLLOUT_ENGINES.get(rollout.name)
    is_started = facts is not None and facts.server_module is not None
    return is_started and not rollout.server_urls and config.trainer.stage == "rl"


def uses_running_servers(config: RunConfig) -> bool:
    """Whether a built-in rollout engine generates in servers that run already."""
    rollout = config.actor_rollout_ref.rollout
    facts = ROLLOUT_ENGINES.get(rollout.name)
    is_server = facts is not None and facts.is_server
    return is_server and bool(rollout.server_urls) and config.trainer.stage == "rl"


def plan_placement(
    config: RunConfig, machine: Machine, estimator: EstimatorFacts | None
) -> Placement:
    """Decide what `auto` leaves open."""
    trainer, actor = config.trainer, config.actor_rollout_ref.actor
    device = _device(trainer.device, machine)
    world_size = trainer.nnodes * trainer.n_gpus_per_node
    pool, reference = rollout_pool(config), reference_pool(config)
    critic = critic_pool(config, estimator)
    runtime = trainer.runtime
    if runtime == "auto":
        is_split = any((pool, reference, critic, reward_pool(config)))
        runtime = "ray" if world_size > 1 or is_split else "local"
    shared = f"{device}, this process" if runtime == "local" else f"{world_size} x {device}, shared"
    roles = [Role(name="actor", engine=training_engine(actor.strategy, world_size), place=shared)]
    if has_teacher(config):
        roles.append(Role(name="teacher", engine="a frozen model", place=shared))
    if trainer.stage != "rl":
        roles += _reference_roles(config, shared)
        return Placement(
            device=device, world_size=world_size, runtime=runtime, roles=tuple(roles), replicas=0
        )
    replicas = count_replicas(config)
    own = _server_place(config, device) if runtime == "local" else None
    roles.append(_rollout_role(config, replicas, own or _place(pool, device, shared)))
    roles += _reference_roles(config, _place(reference, device, shared))
    if needs_critic(config, estimator):
        engine = training_engine(actor.strategy, prod(critic) if critic else world_size)
        roles.append(Role(name="critic", engine=engine, place=_place(critic, device, shared)))
    if config.reward.reward_model.enable:
        roles.append(_reward_role(config, device, shared))
    return Placement(
        device=device,
        world_size=world_size,
        runtime=runtime,
        roles=tuple(roles),
        replicas=replicas,
        rollout_pool=pool,
        reference_pool=reference,
        critic_pool=critic,
    )


def _server_place(config: RunConfig, device: str) -> str | None:
    """Where a built-in engine with a server generates; None: it has none."""
    rollout = config.actor_rollout_ref.rollout
    facts = ROLLOUT_ENGINES.get(rollout.name)
    if facts is None or not facts.is_server:
        return None
    return "running servers" if rollout.server_urls else f"{device}, a server that it starts"


def _device(named: str, machine: Machine) -> str:
    if named != "auto":
        return named
    return "cuda" if machine.gpu_bytes else "cpu"


def _place(pool: tuple[int, int] | None, device: str, shared: str) -> str:
    return shared if pool is None else f"{pool[0]} x {pool[1]} {device} of its own"


def _reference_roles(config: RunConfig, place: str) -> list[Role]:
    if not needs_reference(config):
        return []
    lora = config.actor_rollout_ref.model.lora_rank > 0
    how = "the actor with its adapter off" if lora else "a frozen copy"
    return [Role(name="reference", engine=how, place=place)]


def _rollout_role(config: RunConfig, replicas: int, place: str) -> Role:
    name = config.actor_rollout_ref.rollout.name
    engine = name if replicas == 1 else f"{replicas} copies of {name}"
    return Role(name="rollout", engine=engine, place=place)


def _reward_role(config: RunConfig, device: str, shared: str) -> Role:
    pool, copies = reward_pool(config), count_reward_replicas(config)
    name = config.reward.reward_model.rollout.name
    engine = name if copies == 1 else f"{copies} copies of {name}"
    return Role(name="reward model", engine=engine, place=_place(pool, device, shared))


def needs_reference(config: RunConfig) -> bool:
    """Whether the run keeps a reference policy."""
    if config.trainer.stage != "rl":
        return rows_need_reference(config)
    ref = config.actor_rollout_ref.ref
    if ref.enable is not None:
        return ref.enable
    is_kl_on = config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    return is_kl_on or pairs_need_reference(config)


def needs_critic(config: RunConfig, estimator: EstimatorFacts | None) -> bool:
    """Whether the run trains a critic; `estimator` is None when its name is unknown."""
    if is_pure_distillation(config):
        return False
    if config.critic.enable is not None:
        return config.critic.enable
    return estimator is not None and "values" in estimator.needs


def loss_in_force(config: RunConfig) -> str:
    """Name of the policy loss that runs: bypass mode takes the place of `loss_mode`."""
    if config.algorithm.rollout_correction.bypass_mode:
        return "bypass_mode"
    return config.actor_rollout_ref.actor.policy_loss.loss_mode


def is_off_policy(config: RunConfig) -> bool:
    """Whether some update uses samples that an older version of the weights generated."""
    actor = config.actor_rollout_ref.actor
    several = config.data.train_batch_size > actor.ppo_mini_batch_size
    return several or actor.ppo_epochs > 1 or config.trainer.max_staleness > 0


def has_partial_rollouts(trainer: TrainerConfig) -> bool:
    """Whether responses in progress continue under each new version of the weights."""
    return trainer.max_staleness > 0 and trainer.async_order == "completion"


def count_weight_versions(trainer: TrainerConfig) -> int:
    """Versions of the weights that a rollout engine has room for."""
    return 1 if has_partial_rollouts(trainer) else 1 + trainer.max_staleness


# Hyperparameters of the chosen algorithm, taken from the configuration by name.


def estimator_kwargs(config: RunConfig, facts: EstimatorFacts) -> dict[str, Any]:
    """Keyword arguments of the advantage estimator; an empty list stands for its default.

    One that makes pairs reads how they are compared from `preference`.
    """
    given = {**dict(config.preference), **dict(config.algorithm)}
    return {name: given[name] if given[name] != () else None for name in facts.hparams}


def loss_kwargs(config: RunConfig, facts: LossFacts) -> dict[str, Any]:
    """Keyword arguments of the policy loss; a null `clip_ratio_c` leaves the loss its own."""
    actor = config.actor_rollout_ref.actor
    given = {
        **dict(actor),
        **dict(actor.policy_loss),
        **dict(config.algorithm.rollout_correction),
    }
    own = {"clip_ratio_c"} if actor.clip_ratio_c is None else set[str]()
    return {name: given[name] for name in facts.hparams if name not in own}


# Hyperparameters of a preference loss that the configuration sets, by name.


def preference_kwargs(preference: PreferenceConfig) -> dict[str, Any]:
    """Hyperparameters that are not null; the loss has its own defaults for the rest.

    Example:
        >>> preference_kwargs(PreferenceConfig(beta=0.5))
        {'beta': 0.5}
    """
    given = {
        "beta": preference.beta,
        "label_smoothing": preference.label_smoothing,
        "f_divergence_type": preference.f_divergence_type,
        "f_alpha_divergence_coef": preference.f_alpha_divergence_coef,
        "discopop_tau": preference.discopop_tau,
        "cpo_alpha": preference.cpo_alpha,
        "simpo_gamma": preference.simpo_gamma,
        "alpha": preference.alpha,
        "desirable_weight": preference.desirable_weight,
        "undesirable_weight": preference.undesirable_weight,
    }
    return {name: value for name, value in given.items() if value is not None}
