"""F: weights sharded over devices."""

from collections.abc import Iterator

from luyen.config.rules.rule import Finding, Situation, rule

_FSDP = "actor_rollout_ref.actor.fsdp_config"


@rule("F01", "warning")
def there_are_shards(s: Situation) -> Iterator[Finding]:
    """Keys of sharding are changed only where there is more than one device."""
    for name in ("fsdp_size", "reshard_after_forward", "param_offload", "optimizer_offload"):
        if s.where.world_size == 1 and s.is_changed(f"{_FSDP}.{name}"):
            why = "one device trains, so that nothing is sharded and it has no effect"
            fix = "drop the line, or set trainer.nnodes or n_gpus_per_node above 1"
            yield Finding(field=f"{_FSDP}.{name}", why=why, fix=fix)


@rule("F02", "error")
def shards_and_optimizer_lie_together(s: Situation) -> Iterator[Finding]:
    """Weights and optimizer are offloaded together, or not at all."""
    fsdp_config = s.config.actor_rollout_ref.actor.fsdp_config
    is_split = fsdp_config.param_offload != fsdp_config.optimizer_offload
    if is_split and s.where.world_size > 1:
        name = "param_offload" if fsdp_config.optimizer_offload else "optimizer_offload"
        why = "shards and their optimizer lie in the same memory, and the other key says true"
        yield Finding(field=f"{_FSDP}.{name}", why=why, fix="set both to true, or neither")


@rule("F03", "error")
def replicas_are_of_equal_size(s: Situation) -> Iterator[Finding]:
    """All copies of the weights are sharded over the same number of devices."""
    size, world = s.config.actor_rollout_ref.actor.fsdp_config.fsdp_size, s.where.world_size
    if size != -1 and world > 1 and (size < 1 or world % size):
        why = f"{world} devices cannot be divided into replicas of {size}"
        fix = f"set it to -1, or to a divisor of {world}"
        yield Finding(field=f"{_FSDP}.fsdp_size", why=why, fix=fix)


@rule("F04", "note")
def one_device_is_not_sharded(s: Situation) -> Iterator[Finding]:
    """A sharded training engine is chosen only where there is more than one device."""
    strategy = s.config.actor_rollout_ref.actor.strategy
    if strategy in ("fsdp", "fsdp2") and s.where.world_size == 1:
        why = "one device trains: its weights are whole, and the engine is `single`"
        fix = "leave it if the same file also runs on more devices, or drop the line"
        yield Finding(field="actor_rollout_ref.actor.strategy", why=why, fix=fix)
