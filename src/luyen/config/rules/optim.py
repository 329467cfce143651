"""M: optimizers other than AdamW, 4-bit weights, kinds of adapters, and where they can run."""

from collections.abc import Iterator

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
def dropout_is_of_one_pass(s: RuleContext) -> Iterator[Finding]:
    """An adapter has dropout in stage `sft` alone: elsewhere a second pass has other masks."""
    model, stage = s.config.actor_rollout_ref.model, s.config.trainer.stage
    if model.lora_rank == 0 or model.lora_dropout == 0:
        return
    field = f"{_MODEL}.lora_dropout"
    reasons = {
        "rl": "random masks would make the trainer's log-probabilities differ from the sampler's",
        "preference": "the derivatives of the loss come from a pass of their own, without masks",
        "reward_model": "the derivatives of the loss come from a pass of their own, without masks",
        "distill": "the student would be compared with its teacher through random masks",
    }
    if stage in reasons:
        yield Finding(field=field, why=reasons[stage], fix="set it to 0")
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
