"""R: which devices draw, and how many copies of the rollout engine they hold."""

from collections.abc import Iterator

from luyen.config.plan import devices_of_a_copy
from luyen.config.rules.rule import Finding, Situation, rule

_ROLLOUT = "actor_rollout_ref.rollout"


def _sides(s: Situation) -> tuple[int, str, int]:
    """Devices that the copies take, how that was worked out, and devices that there are."""
    copies, each = s.where.replicas, devices_of_a_copy(s.config)
    words = f"data_parallel_size {copies} x tensor_model_parallel_size {each} = {copies * each}"
    pool = s.where.rollout_pool
    there = pool[0] * pool[1] if pool is not None else s.where.world_size
    return copies * each, words, there


@rule("R09", "error")
def replicas_fit_the_devices(s: Situation) -> Iterator[Finding]:
    """The copies of the engine, each on its devices, fit the devices that draw."""
    needed, words, there = _sides(s)
    if needed > there:
        whose = "trainer" if s.where.rollout_pool is None else "rollout"
        yield Finding(
            field=f"{_ROLLOUT}.data_parallel_size",
            why=f"{words} devices, and {whose}.nnodes x n_gpus_per_node = {there}",
            fix="take fewer copies, or more devices",
        )


@rule("R11", "error")
def every_device_of_the_pool_draws(s: Situation) -> Iterator[Finding]:
    """Of a pool that only draws, every device has a copy of the engine."""
    needed, words, there = _sides(s)
    if s.where.rollout_pool is not None and needed < there:
        yield Finding(
            field=f"{_ROLLOUT}.data_parallel_size",
            why=f"{words} devices draw, and {there} are set aside for that: the others would idle",
            fix="drop the line: every device then draws, or make the pool smaller",
        )


@rule("R12", "error")
def pools_need_processes(s: Situation) -> Iterator[Finding]:
    """Devices of their own need processes of their own."""
    if s.where.rollout_pool is not None and s.where.runtime == "local":
        nodes, each = s.where.rollout_pool
        yield Finding(
            field=f"{_ROLLOUT}.nnodes",
            why=f"{nodes} x {each} devices are to draw beside those that train, and "
            "trainer.runtime=local is one process on one device",
            fix="set trainer.runtime to ray or auto, or drop the line",
        )


@rule("R13", "warning")
def keys_of_the_pool_have_an_effect(s: Situation) -> Iterator[Finding]:
    """Keys about who shares a device are changed only where they are read."""
    is_split = s.where.rollout_pool is not None
    if not is_split and s.is_changed(f"{_ROLLOUT}.n_gpus_per_node"):
        yield Finding(
            field=f"{_ROLLOUT}.n_gpus_per_node",
            why="rollout.nnodes is 0: the engine shares the devices of the actor, which are "
            "trainer.n_gpus_per_node",
            fix="drop the line, or set rollout.nnodes",
        )
    why = None
    if is_split:
        why = "nothing trains on the devices that generate, so nobody needs the memory"
    elif s.config.trainer.max_staleness > 0:
        why = "trainer.max_staleness > 0: the engine generates while the policy learns"
    if why is not None and s.config.actor_rollout_ref.rollout.free_cache_engine:
        yield Finding(field=f"{_ROLLOUT}.free_cache_engine", why=why, fix="drop the line")
