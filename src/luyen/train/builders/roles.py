"""Build actor, rollout engine, reference, teacher, critic and sampling from a configuration."""

import itertools
import os
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

import luyen.rollout.engines
from luyen.base.errors import UserError
from luyen.base.input_files import expanded
from luyen.config.catalog import training_engine
from luyen.config.model_folder.config_json import most_positions
from luyen.config.plan import (
    count_weight_versions,
    has_partial_rollouts,
    ranks_per_sequence,
)
from luyen.config.schema.actor_rollout_ref import ActorConfig, LogProbBatchingConfig
from luyen.config.schema.model import ModelConfig
from luyen.config.schema.run import RunConfig
from luyen.config.tool_file import tools_run_code
from luyen.data.render import Renderer
from luyen.data.tokenizer import Tokenizer, load_tokenizer
from luyen.engine.batch import MicroBatching
from luyen.models.load import choose_threads, load_policy
from luyen.models.policy import Policy, ValueModel
from luyen.rollout.build import ToolEnvironment, build_conversations, build_tool_environment
from luyen.rollout.engines import VersionedEngines, make_checked_engine
from luyen.rollout.protocol import RolloutEngine, Sampling, rollout_engines
from luyen.rollout.servers import openai, sglang, vllm
from luyen.rollout.servers.build import ServerPlace
from luyen.rollout.servers.temporary import temporary_folder
from luyen.runtime.generation import Generation
from luyen.runtime.in_process import is_strict, local_roles
from luyen.runtime.roles import RoleMicroBatching, Roles
from luyen.runtime.split_engine import EngineRanks
from luyen.runtime.training import (
    PolicyLearner,
    RankPlace,
    TrainingEngine,
    ValueLearner,
    ValueTraining,
    training_engines,
)
from luyen.runtime.worker import TrainWorker
from luyen.sandbox.launch import demand
from luyen.train.batch import RequiredSignals

TRAINERS = ("actor", "reference", "teacher", "critic")
"""Roles that training processes have, unless one has a pool of its own."""
_FIELD = "distill.teacher_path"


def load_teacher(
    config: RunConfig, tokenizer: Tokenizer, device: str, *, on_host: bool = False
) -> Policy:
    """Load the frozen teacher; it is not part of checkpoints.

    `tokenizer` is the student's. A UserError where the vocabularies differ: their probabilities
    cannot be compared.
    """
    path = config.distill.teacher_path
    assert path is not None, "the check demands a teacher"
    student = config.actor_rollout_ref.model
    model = ModelConfig(path=path, dtype=student.dtype, trust_remote_code=student.trust_remote_code)
    model = model.model_copy(update={"enable_gradient_checkpointing": False})
    try:
        own = load_tokenizer(path, trust_remote_code=model.trust_remote_code)
        _refuse_other_ids(path, tokenizer.difference(own))
        teacher = load_policy(
            model,
            device=device,
            vocabulary=tokenizer.size,
            may_be_plain=True,
            on_host=on_host,
            field=_FIELD,
        )
    except UserError as error:
        raise UserError(_FIELD, path, error.why, error.fix) from error
    rows = teacher.head.vocabulary
    _refuse_other_ids(
        path, f"it has {rows} of {tokenizer.size} ids" if rows < tokenizer.size else ""
    )
    teacher.requires_grad_(False)
    teacher.is_exact = config.actor_rollout_ref.rollout.deterministic
    return teacher


def _refuse_other_ids(path: str, difference: str | None) -> None:
    if difference:
        why = f"its tokens are not the student's: {difference}"
        raise UserError(_FIELD, path, why, "use a teacher with the tokenizer of the student")


ENGINES = (luyen.rollout.engines, openai, sglang, vllm)
"""Importing them registers the built-in engines."""


def tool_environment_of(config: RunConfig) -> ToolEnvironment | None:
    """Tools and environments of a run; None for single-turn rollouts."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    if tools_run_code(config):
        demand(config.sandbox.require)
    return build_tool_environment(multi_turn) if multi_turn.enable else None


def build_roles(
    config: RunConfig,
    renderer: Renderer,
    tokenizer: Tokenizer,
    needs: RequiredSignals,
    device: str,
    *,
    tool_env: ToolEnvironment | None = None,
    runs_ahead: bool = False,
) -> Roles:
    """Build the roles of a run in this process, on one device.

    `runs_ahead`: generation continues during updates, so several versions are loaded. In strict
    mode messages are pickled.
    """
    worker = build_worker(config, tokenizer, needs, device)
    policy, rollout = worker.actor.policy, config.actor_rollout_ref.rollout
    return local_roles(
        worker=worker,
        engine=versioned_engines(config, policy, tokenizer, device)
        if runs_ahead
        else build_engine(config, policy, tokenizer),
        generation=build_generation(config, tool_env, renderer),
        micro_batching=micro_batching(config, needs),
        frees_cache=rollout.free_cache_engine,
        partial_rollouts=has_partial_rollouts(config.trainer),
        is_strict=is_strict(),
    )


def build_worker(
    config: RunConfig,
    tokenizer: Tokenizer,
    needs: RequiredSignals,
    device: str,
    *,
    rank: int = 0,
    engine: TrainingEngine | None = None,
    on_host: bool = False,
    roles: Collection[str] = TRAINERS,
) -> TrainWorker:
    """Build actor, reference, teacher and critic of a process: those that the run needs.

    `engine` lays them over the ranks, from host memory with `on_host`; None: the engine of a
    process alone. `roles` are those of this process; the rest are in pools of their own.
    """
    arr = config.actor_rollout_ref
    if engine is None:
        make = training_engines.get(training_engine(arr.actor.strategy, 1))
        engine = make(RankPlace(device=device), arr.actor.fsdp_config)
    at = arr.rollout.temperature
    actor = reference = teacher = critic = None
    if "actor" in roles:
        policy = initial_policy(config, tokenizer, device, on_host=on_host)
        actor = build_actor(config, policy, engine)
    if "reference" in roles and needs.reference and arr.model.lora_rank == 0:
        frozen = reference_policy(config, tokenizer, device, on_host=on_host)
        reference = engine.frozen(frozen, temperature=at)
    if "teacher" in roles and needs.teacher:
        frozen = load_teacher(config, tokenizer, device, on_host=on_host)
        teacher = engine.frozen(frozen, temperature=at)
    if "critic" in roles and needs.values:
        value = critic_model(config, tokenizer, device, on_host=on_host)
        if actor is None:
            choose_threads(value)
        critic = build_critic(config, value, engine)
    if actor is None and reference is not None:
        choose_threads(reference.policy)
    return TrainWorker(rank=rank, actor=actor, reference=reference, teacher=teacher, critic=critic)


def build_actor(config: RunConfig, policy: Policy, engine: TrainingEngine) -> PolicyLearner:
    """Build the actor."""
    arr = config.actor_rollout_ref
    choose_threads(policy)
    passes = actor_passes(arr.actor)
    return engine.actor(policy, arr.actor.optim, passes, temperature=arr.rollout.temperature)


def micro_batching(config: RunConfig, needs: RequiredSignals) -> RoleMicroBatching:
    """Micro-batching of all passes, and aggregation of the value loss."""
    arr = config.actor_rollout_ref
    actor, ranks = arr.actor, ranks_per_sequence(config)
    return RoleMicroBatching(
        actor=actor_passes(actor).on_ranks(ranks),
        log_probs=log_prob_passes(arr.rollout, actor).on_ranks(ranks),
        reference=log_prob_passes(arr.ref, actor).on_ranks(ranks),
        critic=critic_passes(config).on_ranks(ranks) if needs.values else None,
        value_aggregation=value_aggregation(config),
        value_scale=actor.loss_scale_factor or float(config.data.max_response_length),
    )


def initial_policy(
    config: RunConfig, tokenizer: Tokenizer, device: str, *, on_host: bool = False
) -> Policy:
    """The policy that a run starts from; `on_host` if a rank will move its part to the device."""
    return load_policy(
        config.actor_rollout_ref.model,
        device=device,
        vocabulary=tokenizer.size,
        seed=config.trainer.seed,
        may_be_plain=may_be_plain(config),
        on_host=on_host,
    )


def may_be_plain(config: RunConfig) -> bool:
    """Whether a model without packing support is allowed: where `native` need not generate."""
    return config.actor_rollout_ref.rollout.name == "hf" or config.trainer.stage != "rl"


def build_engine(
    config: RunConfig,
    policy: Policy,
    tokenizer: Tokenizer,
    *,
    sharing: int = 1,
    replica: int = 0,
) -> RolloutEngine:
    """The rollout engine of a policy; `sharing` engines share the memory of a device.

    A model without packing support falls back to the `hf` engine.
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
    is_server = rollout_engines.facts(name).get("is_server")
    more = {"place": server_place(config, replica)} if is_server else {}
    return make_checked_engine(
        name,
        lambda: make(policy, rollout, longest=longest, decode=decode, **more),
        vocabulary=policy.head.vocabulary,
    )


_SERVERS = itertools.count()


def server_place(config: RunConfig, replica: int) -> ServerPlace:
    """A folder for the next server of this process: in the run directory, if there is one."""
    trainer, model, number = config.trainer, config.actor_rollout_ref.model, next(_SERVERS)
    run = expanded(trainer.default_local_dir) / trainer.project_name / trainer.experiment_name
    above = run / "servers" if run.is_dir() else temporary_folder()
    # A server that runs already may be another user's, and has to read the weights.
    is_private = not config.actor_rollout_ref.rollout.server_urls
    return ServerPlace(
        source=model.tokenizer_path or model.path,
        folder=_new_folder(above, f"{os.getpid()}-{number}", is_private=is_private),
        index=replica * count_weight_versions(trainer) + number,
    )


def _new_folder(above: Path, name: str, *, is_private: bool) -> Path:
    """A folder that is made here, under this name or with a number added to it.

    With `is_private` only this user can read what is in it.

    One that exists may be a link, or hold links: files of a server would be written behind them.
    """
    above.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        folder = above / (f"{name}-{number}" if number else name)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700 if is_private else 0o777)
            return folder
    raise AssertionError("unreachable: numbers do not end")


def split_engine(
    config: RunConfig,
    policy: Policy,
    tokenizer: Tokenizer,
    ranks: EngineRanks,
    *,
    sharing: int = 1,
    replica: int = 0,
) -> RolloutEngine:
    """`build_engine` over this rank's part of the policy, which is divided in place."""
    ranks.divide(policy)
    engine = build_engine(config, policy, tokenizer, sharing=sharing, replica=replica)
    return ranks.add(engine, policy)


def versioned_engines(
    config: RunConfig,
    policy: Policy,
    tokenizer: Tokenizer,
    device: str,
    *,
    replica: int = 0,
    ranks: EngineRanks | None = None,
) -> VersionedEngines:
    """Engines for all weight versions that may be in use at the same time.

    Each has its own copy of trainable parameters; frozen ones are shared with the policy, except
    where `ranks` divide each copy.
    """
    on_host = ranks is not None and device == "cuda"
    own = {name: p for name, p in policy.named_parameters() if not p.requires_grad}
    frozen = own if ranks is None else {}

    def make() -> RolloutEngine:
        copied = initial_policy(config, tokenizer, device, on_host=on_host)
        for name, parameter in copied.named_parameters():
            if name in frozen:
                parameter.data = frozen[name].data
        build = build_engine if ranks is None else partial(split_engine, ranks=ranks)
        return build(config, copied, tokenizer, sharing=versions, replica=replica)

    versions = count_weight_versions(config.trainer)
    return VersionedEngines(make, versions=versions)


def reference_policy(
    config: RunConfig, tokenizer: Tokenizer, device: str, *, on_host: bool = False
) -> Policy:
    """The frozen reference: `ref.path`, or the initial policy."""
    arr = config.actor_rollout_ref
    field = "actor_rollout_ref.ref.path"
    reference = _other_weights(config, arr.ref.path, tokenizer, device, field, on_host=on_host)
    reference.requires_grad_(False)
    reference.is_exact = arr.rollout.deterministic
    return reference


def build_generation(
    config: RunConfig, tool_env: ToolEnvironment | None, renderer: Renderer
) -> Generation:
    """The generation component; multi-turn where there is a `tool_env`."""
    conversations = None
    if tool_env is not None:
        conversations = build_conversations(
            config.actor_rollout_ref.rollout.multi_turn,
            tool_env,
            renderer=renderer,
            max_prompt_length=config.data.max_prompt_length,
            max_response_length=config.data.max_response_length,
        )
    return Generation(renderer=renderer, seed=config.trainer.seed, conversations=conversations)


def actor_passes(actor: ActorConfig) -> MicroBatching:
    """Micro-batching of the actor's update."""
    if actor.use_dynamic_bsz:
        return MicroBatching(max_tokens=actor.ppo_max_token_len_per_gpu)
    return MicroBatching(sequences=actor.ppo_micro_batch_size_per_gpu or 1)


def log_prob_passes(block: LogProbBatchingConfig, actor: ActorConfig) -> MicroBatching:
    """Micro-batching of a log-prob pass: its own settings, else those of the actor's update."""
    use_dynamic_bsz = block.log_prob_use_dynamic_bsz
    if actor.use_dynamic_bsz if use_dynamic_bsz is None else use_dynamic_bsz:
        budget = block.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
        return MicroBatching(max_tokens=budget)
    size = block.log_prob_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu
    return MicroBatching(sequences=size or 1)


def _other_weights(
    config: RunConfig,
    path: str | None,
    tokenizer: Tokenizer,
    device: str,
    field: str,
    *,
    on_host: bool,
) -> Policy:
    """The initial policy, or the pretrained weights at `path`; `field` is the key of the path."""
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
        on_host=on_host,
        field=field if path is not None else "actor_rollout_ref.model.path",
    )


def critic_passes(config: RunConfig) -> MicroBatching:
    """Micro-batching of the critic: its own settings, else those of the actor's update."""
    critic, actor = config.critic, config.actor_rollout_ref.actor
    dynamic = actor.use_dynamic_bsz if critic.use_dynamic_bsz is None else critic.use_dynamic_bsz
    if dynamic:
        budget = critic.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
        return MicroBatching(max_tokens=budget)
    size = critic.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu or 1
    return MicroBatching(sequences=size)


def value_aggregation(config: RunConfig) -> str:
    """Aggregation mode of the value loss."""
    actor = config.actor_rollout_ref.actor
    return config.critic.loss_agg_mode or actor.loss_agg_mode or "token-mean"


def critic_model(
    config: RunConfig, tokenizer: Tokenizer, device: str, *, on_host: bool = False
) -> ValueModel:
    """The value model that a critic starts from."""
    path = config.critic.model.path
    weights = _other_weights(config, path, tokenizer, device, "critic.model.path", on_host=on_host)
    weights.is_exact = config.actor_rollout_ref.rollout.deterministic
    return ValueModel(weights)


def build_critic(config: RunConfig, value: ValueModel, engine: TrainingEngine) -> ValueLearner:
    """Build the critic."""
    critic, actor = config.critic, config.actor_rollout_ref.actor
    how = ValueTraining(
        cliprange_value=critic.cliprange_value,
        aggregation=value_aggregation(config),
        scale=actor.loss_scale_factor or float(config.data.max_response_length),
    )
    return engine.critic(value, critic.optim, critic_passes(config), how)


_ROLLOUT = "actor_rollout_ref.rollout"


def training_sampling(config: RunConfig, tokenizer: Tokenizer) -> Sampling:
    """Sampling parameters of training rollouts."""
    rollout = config.actor_rollout_ref.rollout
    return Sampling(
        max_new_tokens=config.data.max_response_length,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        min_new_tokens=rollout.min_new_tokens,
        stop_ids=_stop_ids(rollout.stop_token_ids, tokenizer, f"{_ROLLOUT}.stop_token_ids"),
        stop_strings=rollout.stop,
    )


def validation_sampling(config: RunConfig, tokenizer: Tokenizer | None) -> Sampling:
    """Sampling parameters of validation; greedy unless `val_kwargs.do_sample`.

    Without a tokenizer `stop_ids` are those of the configuration alone.
    """
    rollout = config.actor_rollout_ref.rollout
    val_kwargs = rollout.val_kwargs
    ids, floor, stop = val_kwargs.stop_token_ids, val_kwargs.min_new_tokens, val_kwargs.stop
    own = f"{_ROLLOUT}.{'' if ids is None else 'val_kwargs.'}stop_token_ids"
    most = config.data.max_response_length
    return Sampling(
        max_new_tokens=min(most, val_kwargs.max_new_tokens or most),
        temperature=val_kwargs.temperature if val_kwargs.do_sample else 0.0,
        top_k=val_kwargs.top_k if val_kwargs.do_sample else -1,
        top_p=val_kwargs.top_p if val_kwargs.do_sample else 1.0,
        min_p=val_kwargs.min_p if val_kwargs.do_sample else 0.0,
        min_new_tokens=rollout.min_new_tokens if floor is None else floor,
        stop_ids=_stop_ids(rollout.stop_token_ids if ids is None else ids, tokenizer, own),
        stop_strings=rollout.stop if stop is None else stop,
    )


def _stop_ids(more: tuple[int, ...], tokenizer: Tokenizer | None, field: str) -> frozenset[int]:
    """Stop ids of tokenizer and configuration; a UserError for ids out of range."""
    if tokenizer is None:
        return frozenset(more)
    unknown = [i for i in more if i >= tokenizer.size]
    if unknown:
        why = f"the tokenizer knows the ids 0 to {tokenizer.size - 1}"
        raise UserError(field, unknown[0], why, "name ids of this model's tokenizer")
    return tokenizer.stop_ids | {*more}
