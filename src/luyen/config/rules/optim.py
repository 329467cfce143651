"""M, F: optimizers, 4-bit weights, adapters; training engines, and what devices divide."""

from collections.abc import Iterable, Iterator
from typing import Any

from luyen.base.errors import did_you_mean
from luyen.config.catalog import READ_AS_FSDP2, ROUTED_MODELS, training_engine
from luyen.config.model_folder.config_json import has_dense_layers
from luyen.config.optimizer_memory import is_optimizer_offloaded
from luyen.config.rules.rule import Finding, RuleContext, rule
from luyen.config.schema.actor_rollout_ref import OptimConfig


def _sides(s: RuleContext) -> Iterator[tuple[str, OptimConfig]]:
    """Key and value of every optimizer that the run has."""
    yield "actor_rollout_ref.actor.optim", s.config.actor_rollout_ref.actor.optim
    if any(role.name == "critic" for role in s.where.roles):
        yield "critic.optim", s.config.critic.optim


@rule("M14", "error")
def optimizer_is_installed(s: RuleContext) -> Iterator[Finding]:
    """8-bit moments come from bitsandbytes, which is installed."""
    for side, optim in _sides(s):
        if optim.name == "adamw_8bit" and not s.installed("bitsandbytes"):
            why = "8-bit moments need bitsandbytes, which is not installed"
            fix = "pip install 'luyen[quant]', or set it to adamw"
            yield Finding(field=f"{side}.name", why=why, fix=fix)


@rule("M15", "error")
def optimizer_takes_shards(s: RuleContext) -> Iterator[Finding]:
    """On several ranks the optimizer is AdamW: a rank has rows of a matrix, and a part of a block.

    Muon orthogonalises whole matrices, and blocks of 8-bit moments would end inside a shard.
    """
    reasons = {
        "muon": "orthogonalises whole matrices, and a rank has some of their rows",
        "adamw_8bit": "rounds blocks of 256 moments, which shards would divide",
    }
    for side, optim in _sides(s):
        if optim.name in reasons and max(s.where.rank_groups) > 1:
            why = f"{optim.name} {reasons[optim.name]}: several ranks cannot share it"
            fix = "set it to adamw, or train on one device"
            yield Finding(field=f"{side}.name", why=why, fix=fix)


@rule("M16", "warning")
def momentum_has_effect(s: RuleContext) -> Iterator[Finding]:
    """`optim.momentum` is changed only for Muon."""
    for side, optim in _sides(s):
        if optim.name != "muon" and s.is_changed(f"{side}.momentum"):
            why = f"{optim.name} has betas instead, so it has no effect"
            yield Finding(
                field=f"{side}.momentum", why=why, fix=f"set {side}.name=muon, or drop it"
            )


_QUANTIZATION = "actor_rollout_ref.model.quantization"
_SERVER = "actor_rollout_ref.rollout.server"


@rule("M17", "error")
def quantised_weights_have_an_adapter(s: RuleContext) -> Iterator[Finding]:
    """4-bit weights stay as they are: an adapter over them learns."""
    model = s.config.actor_rollout_ref.model
    if model.quantization != "none" and model.lora_rank == 0:
        why = "4-bit weights cannot be trained, and lora_rank=0 trains all weights"
        fix = "set actor_rollout_ref.model.lora_rank, 16 say, or quantization=none"
        yield Finding(field=_QUANTIZATION, why=why, fix=fix)


@rule("M18", "error")
def quantised_weights_can_be_held(s: RuleContext) -> Iterator[Finding]:
    """4-bit weights come from bitsandbytes, and are whole on one device."""
    if s.config.actor_rollout_ref.model.quantization == "none":
        return
    if not s.installed("bitsandbytes"):
        why = "4-bit weights need bitsandbytes, which is not installed"
        fix = "pip install 'luyen[quant]', or set it to none"
        yield Finding(field=_QUANTIZATION, why=why, fix=fix)
    if max(s.where.rank_groups) > 1:
        why = "blocks of 4-bit weights are not sharded over several ranks (fsdp2)"
        fix = "train on one device, or set it to none"
        yield Finding(field=_QUANTIZATION, why=why, fix=fix)


@rule("M19", "error")
def sampler_has_the_quantised_weights(s: RuleContext) -> Iterator[Finding]:
    """Rollouts are generated with the 4-bit weights that are trained over."""
    rollout = s.config.actor_rollout_ref.rollout
    is_online = s.config.trainer.stage == "rl"
    if s.config.actor_rollout_ref.model.quantization == "none" or not is_online:
        return
    if rollout.name == "openai":
        why = "an endpoint that is sent no weights has those that were never quantised"
        fix = "set actor_rollout_ref.rollout.name to native, hf, vllm or sglang"
        yield Finding(field=_QUANTIZATION, why=why, fix=fix)
    is_server = rollout.name in ("vllm", "sglang")
    if is_server and rollout.server_urls and rollout.server.lora_format == "adapter":
        why = "servers of server_urls are sent the adapter alone, over weights of their own"
        fix = f"set {_SERVER}.lora_format=merged, or drop server_urls"
        yield Finding(field=_QUANTIZATION, why=why, fix=fix)


@rule("M20", "warning")
def double_quantisation_has_effect(s: RuleContext) -> Iterator[Finding]:
    """`model.double_quantization` is changed only for 4-bit weights."""
    field = "actor_rollout_ref.model.double_quantization"
    if s.config.actor_rollout_ref.model.quantization == "none" and s.is_changed(field):
        why = "quantization=none has no scales, so it has no effect"
        yield Finding(field=field, why=why, fix=f"set {_QUANTIZATION}=nf4, or drop it")


# Kinds of adapters.

_MODEL = "actor_rollout_ref.model"


@rule("M21", "error")
def dropout_is_not_for_rl(s: RuleContext) -> Iterator[Finding]:
    """An adapter has no dropout in stage `rl`: the sampler has no masks."""
    model, stage = s.config.actor_rollout_ref.model, s.config.trainer.stage
    if model.lora_rank == 0 or model.lora_dropout == 0:
        return
    field = f"{_MODEL}.lora_dropout"
    if stage == "rl":
        why = "random masks would make the trainer's log-probabilities differ from the sampler's"
        yield Finding(field=field, why=why, fix="set it to 0")
    elif model.tiled_mlp.enabled:
        yield Finding(
            field=field,
            why="slices of a feed-forward layer (model.tiled_mlp) would all get the same mask",
            fix=f"set it to 0, or {_MODEL}.tiled_mlp.enabled=false",
        )


@rule("M22", "error")
def server_computes_the_adapter(s: RuleContext) -> Iterator[Finding]:
    """A server is sent an adapter alone only if it computes that kind of adapter."""
    config = s.config.actor_rollout_ref
    model, rollout = config.model, config.rollout
    is_sent = rollout.name in ("vllm", "sglang") and rollout.server.lora_format == "adapter"
    if s.config.trainer.stage != "rl" or model.lora_rank == 0 or not is_sent:
        return
    fix = f"set {_SERVER}.lora_format=merged"
    if model.use_dora:
        why = "servers add an adapter's output, and DoRA scales that of the weight below too"
        yield Finding(field=f"{_MODEL}.use_dora", why=why, fix=fix)
    if model.use_rslora and rollout.name == "sglang":
        why = "sglang multiplies every adapter by alpha/rank"
        yield Finding(field=f"{_MODEL}.use_rslora", why=why, fix=fix)


@rule("H07", "error")
def norms_are_of_whole_weights(s: RuleContext) -> Iterator[Finding]:
    """DoRA is trained on one device, over weights that are not quantised."""
    model = s.config.actor_rollout_ref.model
    if model.lora_rank == 0 or not model.use_dora:
        return
    if max(s.where.rank_groups) > 1:
        why = "it reads norms of whole weights in every pass, and ranks have shards of them (fsdp2)"
        fix = "train on one device, or set it to false"
        yield Finding(field=f"{_MODEL}.use_dora", why=why, fix=fix)
    if model.quantization != "none":
        why = "it would restore every 4-bit weight a second time in each pass, for its norms"
        fix = f"set it to false, or {_QUANTIZATION}=none"
        yield Finding(field=f"{_MODEL}.use_dora", why=why, fix=fix)


# F: training engines, and what they divide over devices: weights, sequences and layers.

_STRATEGY = "actor_rollout_ref.actor.strategy"
_INSTEAD = "use fsdp2, which shards the same models over as many devices"
_FOREIGN = {
    "veomni": (
        "there is no adapter to VeOmni: 0.1.12 needs datasets below 2.22 (the extra `datasets` is "
        "4 or newer) and Python below 3.13, and its extra for GPUs pins torch 2.11.0+cu130; it is "
        "FSDP2 with sequence parallelism around models that it builds and loads itself",
        f"{_INSTEAD}, with fsdp_config.ulysses_sequence_parallel_size for long sequences",
    ),
}
"""Engines of the field without an adapter -> why not, and the way out."""


@rule("F08", "error")
def training_engine_exists(s: RuleContext) -> Iterator[Finding]:
    """`actor.strategy` is a registered training engine, and its package is installed."""
    name = s.config.actor_rollout_ref.actor.strategy
    facts = s.known.training_engines.get(training_engine(name, max(s.where.rank_groups)))
    if facts is None:
        near = did_you_mean(name, ("auto", *s.known.training_engines))
        why, fix = "no such training engine is registered", f"{near}; a plugin may register another"
        why, fix = _FOREIGN.get(name, (why, fix))
        yield Finding(field=_STRATEGY, why=why, fix=fix)
    elif facts.package is not None and not s.installed(facts.package):
        why = f"the engine needs the package {facts.package}, which is not installed here"
        source = facts.package if facts.extra is None else f"'luyen[{facts.extra}]'"
        fix = f"pip install {source}, or set it to auto"
        yield Finding(field=_STRATEGY, why=why, fix=fix)


@rule("F09", "note")
def other_names_are_read_as_fsdp2(s: RuleContext) -> Iterator[Finding]:
    """Names of sharded training engines elsewhere are read as `fsdp2`."""
    name = s.config.actor_rollout_ref.actor.strategy
    if name in READ_AS_FSDP2 and max(s.where.rank_groups) > 1:
        why = f"it is read as `fsdp2`: elsewhere it is {READ_AS_FSDP2[name]}"
        yield Finding(field=_STRATEGY, why=why, fix="set it to fsdp2 or auto, or leave it")


_FSDP = "actor_rollout_ref.actor.fsdp_config"


@rule("F01", "warning")
def there_are_shards(s: RuleContext) -> Iterator[Finding]:
    """Keys of sharding are changed only where there is more than one device."""
    for name in ("fsdp_size", "reshard_after_forward", "param_offload", "optimizer_offload"):
        moves = name == "optimizer_offload" and s.where.device == "cuda"
        if max(s.where.rank_groups) == 1 and s.is_changed(f"{_FSDP}.{name}") and not moves:
            why = "one device trains, so that nothing is sharded and it has no effect"
            fix = "drop the line, or set trainer.nnodes or n_gpus_per_node above 1"
            if name == "optimizer_offload":
                why, fix = "a CPU computes in host memory: it has no effect", "drop the line"
            yield Finding(field=f"{_FSDP}.{name}", why=why, fix=fix)


@rule("F14", "error")
def only_adamw_is_offloaded(s: RuleContext) -> Iterator[Finding]:
    """On one GPU an optimizer in host memory is AdamW."""
    fsdp_config = s.config.actor_rollout_ref.actor.fsdp_config
    if not is_optimizer_offloaded(fsdp_config, s.where.device, max(s.where.rank_groups)):
        return
    reasons = {"muon": "needs whole matrices", "adamw_8bit": "keeps its blocks on the device"}
    for side, optim in _sides(s):
        if optim.name in reasons:
            why = f"{side}.name={optim.name} {reasons[optim.name]}"
            yield Finding(field=f"{_FSDP}.optimizer_offload", why=why, fix="set it to false")


@rule("F02", "error")
def shards_and_optimizer_lie_together(s: RuleContext) -> Iterator[Finding]:
    """Weights and optimizer are offloaded together, or not at all."""
    fsdp_config = s.config.actor_rollout_ref.actor.fsdp_config
    is_split = fsdp_config.param_offload != fsdp_config.optimizer_offload
    if is_split and max(s.where.rank_groups) > 1:
        name = "param_offload" if fsdp_config.optimizer_offload else "optimizer_offload"
        why = "shards and their optimizer are in the same memory, and the other key is true"
        yield Finding(field=f"{_FSDP}.{name}", why=why, fix="set both to true, or neither")


@rule("F03", "error")
def replicas_are_of_equal_size(s: RuleContext) -> Iterator[Finding]:
    """All copies of the weights are sharded over the same number of devices."""
    size = s.config.actor_rollout_ref.actor.fsdp_config.fsdp_size
    for world in dict.fromkeys(s.where.rank_groups):
        if size != -1 and world > 1 and (size < 1 or world % size):
            why = f"{world} devices cannot be divided into replicas of {size}"
            fix = f"set it to -1, or to a divisor of {world}"
            yield Finding(field=f"{_FSDP}.fsdp_size", why=why, fix=fix)


@rule("F07", "error")
def devices_share_sequences_in_groups(s: RuleContext) -> Iterator[Finding]:
    """The devices of every role divide into groups that each compute a sequence together."""
    size = s.batch.ranks_per_sequence
    for world in dict.fromkeys(s.where.rank_groups):
        if world % size:
            word = "one device trains" if world == 1 else f"{world} devices train"
            why = f"{word}, and groups of {size} compute each sequence together"
            divisors = [n for n in range(1, world + 1) if world % n == 0]
            fix = f"set it to one of {', '.join(map(str, divisors))}, or change the devices"
            if world == 1:
                fix = "set it to 1, or set trainer.nnodes or n_gpus_per_node above 1"
            yield Finding(field=f"{_FSDP}.ulysses_sequence_parallel_size", why=why, fix=fix)


@rule("F12", "error")
def stage_divides_sequences(s: RuleContext) -> Iterator[Finding]:
    """Sequences are divided over devices where a stage reads log-probabilities alone."""
    reasons = {
        "reward_model": "a reward model reads whole sequences",
        "distill": "student and teacher are compared over whole sequences",
    }
    stage = s.config.trainer.stage
    if stage in reasons and s.batch.ranks_per_shard > 1:
        field = f"{_FSDP}.ulysses_sequence_parallel_size"
        yield Finding(field=field, why=reasons[stage], fix="set it to 1")


@rule("F13", "error")
def offline_stages_have_built_in_engines(s: RuleContext) -> Iterator[Finding]:
    """Stages that learn from given rows train with `single` or `fsdp2`, and with whole layers."""
    actor, stage = s.config.actor_rollout_ref.actor, s.config.trainer.stage
    if stage == "rl":
        return
    if training_engine(actor.strategy, max(s.where.rank_groups)) not in ("single", "fsdp2"):
        why = f"stage {stage} trains with the built-in engines alone"
        yield Finding(field=_STRATEGY, why=why, fix="set it to auto")
    if actor.fsdp_config.tensor_parallel_size > 1:
        why = f"stage {stage} does not divide layers"
        yield Finding(field=f"{_FSDP}.tensor_parallel_size", why=why, fix="set it to 1")


@rule("F04", "note")
def one_device_is_not_sharded(s: RuleContext) -> Iterator[Finding]:
    """A sharded training engine is chosen only where there is more than one device."""
    strategy = s.config.actor_rollout_ref.actor.strategy
    if strategy in ("fsdp2", *READ_AS_FSDP2) and max(s.where.rank_groups) == 1:
        why = "one device trains: its weights are whole, and the engine is `single`"
        fix = "leave it if the same file also runs on more devices, or drop the line"
        yield Finding(field=_STRATEGY, why=why, fix=fix)


_TENSOR = f"{_FSDP}.tensor_parallel_size"
_DIVIDED = ("llama", "mistral", "qwen2", "qwen3", *ROUTED_MODELS)
"""Types of models whose layers can be divided."""


@rule("F10", "error")
def devices_divide_layers(s: RuleContext) -> Iterator[Finding]:
    """The devices of every role divide into groups that divide each layer, and its sizes divide."""
    size = s.config.actor_rollout_ref.actor.fsdp_config.tensor_parallel_size
    if size == 1:
        return
    engine = training_engine(s.config.actor_rollout_ref.actor.strategy, max(s.where.rank_groups))
    for world in dict.fromkeys(s.where.rank_groups):
        if world % size:
            word = "one device trains" if world == 1 else f"{world} devices train"
            why = f"{word}, and groups of {size} divide each layer"
            fix = f"set it to 1 or to a divisor of {world}, or change the devices"
            if world == 1:
                fix = "set it to 1, or set trainer.nnodes or n_gpus_per_node above 1"
            yield Finding(field=_TENSOR, why=why, fix=fix)
            return
    if engine == "megatron":
        return  # F17 knows which models it divides
    for field, raw in s.models_on_devices():
        yield from cannot_divide(field or _TENSOR, raw, size, key=_TENSOR)


def cannot_divide(field: str, raw: dict[str, Any], size: int, *, key: str) -> Iterator[Finding]:
    """Why so many devices, as `key` says, cannot divide the layers of the model of `field`."""
    kind, is_other = raw.get("model_type"), field != key
    if raw and kind not in _DIVIDED:
        why = f"how the layers of a {kind} model are divided is not known"
        fix = f"set {key} to 1, or name one of {', '.join(_DIVIDED)}"
        yield Finding(field=field, why=why, fix=fix)
        return
    for name in _divided_sizes(raw):
        number = raw.get(name)
        if isinstance(number, int) and number % size:
            why = f"the model's {name} is {number}, which {size} devices cannot divide"
            fix = f"set {key if is_other else 'it'} to a divisor of {number}"
            yield Finding(field=field, why=why, fix=fix)


def _divided_sizes(raw: dict[str, Any]) -> Iterator[str]:
    """Names of the sizes of a model that devices divide."""
    yield from ("num_attention_heads", "vocab_size")
    is_mixture = raw.get("model_type") in ROUTED_MODELS
    if is_mixture:
        yield from ("num_experts", "num_local_experts", "shared_expert_intermediate_size")
    # Mixtral gives the width of its experts, which stay whole, this name.
    if not is_mixture or has_dense_layers(raw):
        yield "intermediate_size"


@rule("F11", "error")
def divided_layers_go_with_the_rest(s: RuleContext) -> Iterator[Finding]:
    """`fsdp2` or `megatron` divides layers: whole sequences, one copy, no 4-bit weights."""
    actor, model = s.config.actor_rollout_ref.actor, s.config.actor_rollout_ref.model
    if actor.fsdp_config.tensor_parallel_size == 1:
        return
    ranks = max(s.where.rank_groups)
    reasons = {
        f"{_FSDP}.ulysses_sequence_parallel_size": (
            actor.fsdp_config.ulysses_sequence_parallel_size > 1,
            "sequences cannot be divided where layers are",
        ),
        f"{_FSDP}.fsdp_size": (
            actor.fsdp_config.fsdp_size != -1,
            "copies of divided layers were never tried",
        ),
        _STRATEGY: (
            ranks > 1 and training_engine(actor.strategy, ranks) not in ("fsdp2", "megatron"),
            "only fsdp2 and megatron divide layers",
        ),
        "actor_rollout_ref.model.quantization": (
            model.quantization != "none",
            "4-bit weights cannot be divided",
        ),
        "actor_rollout_ref.model.use_dora": (
            model.lora_rank > 0 and model.use_dora,
            "the norms of DoRA are taken of whole weights",
        ),
        "actor_rollout_ref.model.lora_dropout": (
            model.lora_rank > 0 and model.lora_dropout > 0,
            "ranks would drop the same places of different inputs",
        ),
        "actor_rollout_ref.model.target_modules": (
            model.lora_rank > 0 and "embed_tokens" in _last_names(model.target_modules),
            "the rows of an embedding with an adapter are not divided",
        ),
    }
    for field, (is_set, why) in reasons.items():
        if is_set:
            fix = f"drop the line, or set {_TENSOR} to 1"
            yield Finding(field=field, why=why, fix=fix)


def _last_names(modules: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in modules}


_POOLS = ("actor_rollout_ref.ref", "critic")


@rule("F05", "error")
def pools_of_roles_need_processes(s: RuleContext) -> Iterator[Finding]:
    """A separate pool of the reference or the critic needs the Ray runtime."""
    for block, pool in zip(_POOLS, (s.where.reference_pool, s.where.critic_pool), strict=True):
        if pool is not None and s.where.runtime == "local":
            yield Finding(
                field=f"{block}.nnodes",
                why=f"{pool[0]} x {pool[1]} devices are set aside for it, and "
                "trainer.runtime=local is one process on one device",
                fix="set trainer.runtime to ray or auto, or drop the line",
            )


@rule("F06", "warning")
def pools_of_roles_are_used(s: RuleContext) -> Iterator[Finding]:
    """Keys about devices of the reference or the critic are changed only if they are read."""
    pools = (s.where.reference_pool, s.where.critic_pool)
    names = {role.name for role in s.where.roles}
    is_lora = s.config.actor_rollout_ref.model.lora_rank > 0
    for block, role, pool in zip(_POOLS, ("reference", "critic"), pools, strict=True):
        for name in ("nnodes", "n_gpus_per_node"):
            if pool is not None or not s.is_changed(f"{block}.{name}"):
                continue
            why = f"{block}.nnodes is 0: the {role} shares the devices of the actor"
            fix = f"drop the line, or set {block}.nnodes"
            if role not in names:
                why, fix = f"the run has no {role}, so it has no effect", "drop the line"
            elif role == "reference" and is_lora:
                why, fix = "the reference is the actor with its adapter off", "drop the line"
            elif s.config.trainer.stage != "rl":
                why, fix = "offline stages have one pool of devices", "drop the line"
            yield Finding(field=f"{block}.{name}", why=why, fix=fix)
