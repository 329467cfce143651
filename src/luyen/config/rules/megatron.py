"""F: what the training engine `megatron` does, and what it does not."""

from collections.abc import Iterator

from luyen.config.catalog import ROUTED_MODELS, training_engine
from luyen.config.megatron_models import why_not
from luyen.config.rules.rule import Finding, RuleContext, rule
from luyen.config.schema.actor_rollout_ref import FsdpConfig
from luyen.config.schema.model import ModelConfig

_ACTOR = "actor_rollout_ref.actor"
_FSDP = f"{_ACTOR}.fsdp_config"
_MODEL = "actor_rollout_ref.model"


def _is_chosen(s: RuleContext) -> bool:
    strategy = s.config.actor_rollout_ref.actor.strategy
    return training_engine(strategy, max(s.where.rank_groups)) == "megatron"


def _absent(model: ModelConfig, fsdp_config: FsdpConfig) -> dict[str, tuple[bool, str, str]]:
    """Key of a part that is not built -> whether it is wanted, why not, and the way out."""
    stays = "weights and optimizer stay on the device"
    return {
        f"{_MODEL}.lora_rank": (model.lora_rank > 0, "adapters are not built", "set it to 0"),
        f"{_MODEL}.quantization": (
            model.quantization != "none",
            "4-bit weights are not built",
            "set it to none",
        ),
        f"{_MODEL}.tiled_mlp.enabled": (
            model.tiled_mlp.enabled,
            "feed-forward layers are not sliced",
            "set it to false",
        ),
        f"{_MODEL}.enable_activation_offload": (
            model.enable_activation_offload,
            "activations stay on the device",
            "set it to false",
        ),
        f"{_FSDP}.ulysses_sequence_parallel_size": (
            fsdp_config.ulysses_sequence_parallel_size > 1,
            "sequences are not divided",
            "set it to 1",
        ),
        f"{_FSDP}.fsdp_size": (
            fsdp_config.fsdp_size != -1,
            "masters and moments are sharded over all ranks that do not divide layers",
            "drop the line",
        ),
        f"{_FSDP}.param_offload": (fsdp_config.param_offload, stays, "drop the line"),
        f"{_FSDP}.optimizer_offload": (fsdp_config.optimizer_offload, stays, "drop the line"),
        f"{_FSDP}.reshard_after_forward": (
            not fsdp_config.reshard_after_forward,
            "no weights are gathered for a pass",
            "drop the line",
        ),
    }


@rule("F15", "error")
def megatron_has_the_part(s: RuleContext) -> Iterator[Finding]:
    """`megatron` has no adapters, 4-bit weights, offload, or sequence parallelism."""
    if not _is_chosen(s):
        return
    config = s.config.actor_rollout_ref
    for field, (is_set, why, fix) in _absent(config.model, config.actor.fsdp_config).items():
        if is_set:
            yield Finding(field=field, why=f"with megatron {why}", fix=f"{fix}, or use fsdp2")


@rule("F16", "error")
def megatron_has_ranks(s: RuleContext) -> Iterator[Finding]:
    """`megatron` trains on several devices: on one there is nothing to divide or to shard."""
    if _is_chosen(s) and max(s.where.rank_groups) == 1:
        why = "one device trains, and the embedded engines generate with the weights of `single`"
        fix = "set it to auto, or set trainer.nnodes or n_gpus_per_node above 1"
        yield Finding(field=f"{_ACTOR}.strategy", why=why, fix=fix)


@rule("F17", "error")
def megatron_builds_the_model(s: RuleContext) -> Iterator[Finding]:
    """`megatron` builds Llama, Mistral, Qwen 2, Qwen 3 and their mixtures of experts, of sizes that
    the devices divide.
    """
    if not _is_chosen(s):
        return
    tensor_size, expert_size = _sizes(s)
    for field, raw in s.models_on_devices():
        for world in dict.fromkeys(s.where.rank_groups):
            copies = max(1, world // (tensor_size * expert_size))
            reason = (
                why_not(raw, tensor_size, expert_size=expert_size, copies=copies) if raw else None
            )
            if reason is not None:
                yield Finding(field=field or f"{_ACTOR}.strategy", why=reason[0], fix=reason[1])
                break


@rule("F18", "error")
def megatron_divides_experts(s: RuleContext) -> Iterator[Finding]:
    """`megatron` alone divides experts over devices with different sequences, in equal groups."""
    tensor_size, size = _sizes(s)
    if size == 1:
        return
    field = f"{_FSDP}.expert_parallel_size"
    if not _is_chosen(s):
        why = "only megatron divides experts over devices that compute different sequences"
        fix = f"set it to 1, or set {_ACTOR}.strategy to megatron"
        yield Finding(field=field, why=why, fix=fix)
        return
    for world in dict.fromkeys(s.where.rank_groups):
        if world % (tensor_size * size):
            why = f"{world} devices train, {tensor_size} of them divide each layer"
            fix = f"set it to 1, or to a divisor of {max(1, world // tensor_size)}"
            yield Finding(field=field, why=why, fix=fix)
            break
    for name, raw in s.models_on_devices():
        kind = raw.get("model_type")
        if raw and kind not in ROUTED_MODELS:
            why = f"a {kind} model has no experts that are divided"
            yield Finding(field=name or field, why=why, fix=f"set {field} to 1")


def _sizes(s: RuleContext) -> tuple[int, int]:
    """Devices that divide each layer, and groups of them with different experts."""
    fsdp_config = s.config.actor_rollout_ref.actor.fsdp_config
    return fsdp_config.tensor_parallel_size, fsdp_config.expert_parallel_size
