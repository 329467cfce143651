"""Assignment of roles to devices: pure arithmetic, before anything is reserved on a cluster.

A pool is a set of devices (GPUs, or cores without GPUs) in groups, each on one node. Roles of one
pool share its devices; a process takes a fraction of a device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from luyen.base.errors import UserError
from luyen.config.plan import Placement, count_reward_replicas, ranks_per_replica, reward_pool
from luyen.config.schema.run import RunConfig

Device: TypeAlias = Literal["cpu", "cuda"]
SHARED, ROLLOUT, REWARD = "shared", "rollout", "reward model"
REFERENCE, CRITIC = "reference", "critic"
_COPIES = "actor_rollout_ref.rollout.data_parallel_size"
_GRAIN = 10_000
"""Ray's resolution of fractional resources: 1 / 10000."""
_FIELDS = {
    SHARED: ("trainer.n_gpus_per_node", "set trainer.nnodes and n_gpus_per_node to what there is"),
    ROLLOUT: (
        "actor_rollout_ref.rollout.n_gpus_per_node",
        "make its pool smaller, or set rollout.nnodes to 0: copies then share the devices of the "
        "actor",
    ),
    REFERENCE: (
        "actor_rollout_ref.ref.n_gpus_per_node",
        "make its pool smaller, or set ref.nnodes to 0: it then shares the devices of the actor",
    ),
    CRITIC: (
        "critic.n_gpus_per_node",
        "make its pool smaller, or set critic.nnodes to 0: it then shares the devices of the actor",
    ),
    REWARD: (
        "reward.reward_model.n_gpus_per_node",
        "make its pool smaller, or set enable_resource_pool to false",
    ),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOffer:
    """Resources of a node.

    Example:
        >>> NodeOffer(name="a", cpus=8, gpus=2).devices("cuda")
        2
    """

    name: str
    """Its id."""
    cpus: int
    """Cores."""
    gpus: int = 0
    """GPUs."""

    def devices(self, device: Device) -> int:
        """How many devices of a kind."""
        return self.gpus if device == "cuda" else self.cpus


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """Devices that a run needs.

    Example:
        >>> PoolFacts(device="cpu", nnodes=1, per_node=2, replicas=2).is_split
        False
    """

    device: Device
    """Kind of device."""
    nnodes: int
    """Groups of training devices."""
    per_node: int
    """Devices of each group."""
    replicas: int
    """Copies of the rollout engine; 0: the run has none."""
    ranks_per_replica: int = 1
    """Devices of each copy, which are on one node."""
    rollout: tuple[int, int] | None = None
    """Groups and devices of each, of the rollout engine's own pool; None: it has none."""
    trainers: tuple[str, ...] = ("actor",)
    """Roles of the training processes on the shared devices."""
    reference: tuple[int, int] | None = None
    """Groups and devices of each, of the reference's own pool; None: it has none."""
    critic: tuple[int, int] | None = None
    """Groups and devices of each, of the critic's own pool; None: it has none."""
    reward: tuple[int, int] | None = None
    """Groups and devices of each, of the reward model's own pool; None: it has none."""
    is_reward_shared: bool = False
    """Whether a reward model shares the devices of the actor."""
    reward_replicas: int | None = None
    """Copies of the reward model; None: one on each device that it has."""

    @property
    def is_split(self) -> bool:
        """Whether copies of the rollout engine have devices of their own."""
        return self.rollout is not None

    @classmethod
    def of(cls, config: RunConfig, where: Placement) -> "PoolFacts":
        """Devices that a configuration needs."""
        model, own = config.reward.reward_model, reward_pool(config)
        is_scored = model.enable and config.trainer.stage == "rl"
        trained = {REFERENCE: where.reference_pool, CRITIC: where.critic_pool}
        apart = {ROLLOUT, REWARD, *(name for name, pool in trained.items() if pool is not None)}
        return cls(
            device="cuda" if where.device == "cuda" else "cpu",
            nnodes=config.trainer.nnodes,
            per_node=config.trainer.n_gpus_per_node,
            replicas=where.replicas,
            ranks_per_replica=ranks_per_replica(config),
            rollout=where.rollout_pool,
            trainers=tuple(role.name for role in where.roles if role.name not in apart),
            reference=where.reference_pool,
            critic=where.critic_pool,
            reward=own,
            is_reward_shared=is_scored and own is None,
            reward_replicas=count_reward_replicas(config) if is_scored else None,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePool:
    """Devices shared by some roles.

    Example:
        >>> DevicePool(name="shared", roles=("actor",), groups=(4, 4)).words("cuda")
        'shared (actor): 2 x 4 = 8 GPUs'
    """

    name: str
    """Name of the pool."""
    roles: tuple[str, ...]
    """Roles that use it."""
    groups: tuple[int, ...]
    """Devices of each group; a group is on one node."""

    @property
    def devices(self) -> int:
        """Devices in all."""
        return sum(self.groups)

    def words(self, device: Device) -> str:
        """The pool as text, for error messages."""
        return (
            f"{self.name} ({', '.join(self.roles)}): {len(self.groups)} x {self.groups[0]} = "
            f"{self.devices} {_unit(device)}"
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The device of one process of a role.

    Example:
        >>> Slot(pool="shared", group=0, bundle=1, share=0.5).share
        0.5
    """

    pool: str
    """Name of the pool."""
    group: int
    """Index of the group in it."""
    bundle: int
    """Index of the device in the group."""
    share: float
    """Fraction of the device that it takes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePools:
    """All pools of a run, and the slot of every process.

    Example:
        >>> facts = PoolFacts(device="cpu", nnodes=1, per_node=2, replicas=2)
        >>> pools = plan_pools(facts, [NodeOffer(name="a", cpus=2)])
        >>> [slot.share for slot in pools.slots["rollout"]]
        [0.5, 0.5]
    """

    device: Device
    """Kind of device."""
    pools: tuple[DevicePool, ...]
    """The largest groups first, which is the order to reserve them in."""
    slots: Mapping[str, tuple[Slot, ...]]
    """Of each role, one for each of its processes. Roles of one process have the same slots."""


def plan_pools(facts: PoolFacts, nodes: Sequence[NodeOffer]) -> DevicePools:
    """Pools and slots; a UserError that shows the arithmetic if the cluster is too small."""
    if facts.reward is not None and min(facts.reward) < 1:
        count, each = facts.reward
        why = f"its own pool of {count} x {each} devices is empty"
        fix = "set reward.reward_model.nnodes and n_gpus_per_node"
        raise UserError(_FIELDS[REWARD][0], each, why, fix)
    pools = sorted(pools_of(facts), key=lambda pool: -pool.groups[0])
    lack = _shortage(facts.device, pools, nodes)
    if lack is not None:
        raise lack
    return DevicePools(device=facts.device, pools=tuple(pools), slots=_slots(facts))


def pools_of(facts: PoolFacts) -> list[DevicePool]:
    """The pools that a run needs, and the roles that use them.

    Example:
        >>> facts = PoolFacts(device="cuda", nnodes=1, per_node=4, replicas=2, rollout=(1, 2))
        >>> [pool.words("cuda") for pool in pools_of(facts)]
        ['shared (actor): 1 x 4 = 4 GPUs', 'rollout (rollout): 1 x 2 = 2 GPUs']
    """
    colocated = () if facts.is_split or not facts.replicas else (ROLLOUT,)
    colocated += (REWARD,) if facts.is_reward_shared else ()
    groups = (facts.per_node,) * facts.nnodes
    pools = [DevicePool(name=SHARED, roles=(*facts.trainers, *colocated), groups=groups)]
    separate = {
        ROLLOUT: facts.rollout,
        REFERENCE: facts.reference,
        CRITIC: facts.critic,
        REWARD: facts.reward,
    }
    for name, own in separate.items():
        if own is not None and min(own) > 0:
            pools.append(DevicePool(name=name, roles=(name,), groups=(own[1],) * own[0]))
    return pools


def _slots(facts: PoolFacts) -> dict[str, tuple[Slot, ...]]:
    places = [(group, i) for group in range(facts.nnodes) for i in range(facts.per_node)]
    needed = facts.replicas * facts.ranks_per_replica
    on_shared = 0 if facts.is_split else needed
    if facts.rollout is not None and needed > facts.rollout[0] * facts.rollout[1]:
        why = f"{facts.replicas} copies have {facts.rollout[0]} x {facts.rollout[1]} devices"
        raise UserError(_COPIES, facts.replicas, why, "drop it: every device then has a copy")
    if on_shared > len(places) and facts.device == "cuda":
        why = f"{on_shared} copies would share {len(places)} GPUs, at most one on each"
        raise UserError(_COPIES, facts.replicas, why, f"set it to {len(places)}")
    processes = 1 + -(-on_shared // len(places)) + facts.is_reward_shared
    share = _GRAIN // processes / _GRAIN

    def shared(count: int, ranks: int = 1) -> tuple[Slot, ...]:
        # Ranks fill one node after the other; roles with fewer processes spread over the nodes,
        # `ranks` consecutive devices at a time.
        spread = sorted(places, key=lambda place: place[1] // ranks)
        order = places if count == len(places) else spread
        chosen = [order[i % len(order)] for i in range(count)]
        return tuple(Slot(pool=SHARED, group=g, bundle=i, share=share) for g, i in chosen)

    slots = {role: shared(len(places)) for role in facts.trainers}
    slots[ROLLOUT] = shared(on_shared, facts.ranks_per_replica)
    if facts.rollout is not None:
        own = _whole(ROLLOUT, (facts.rollout[1],) * facts.rollout[0])
        slots[ROLLOUT] = own[:needed]
    for name, pool in ((REFERENCE, facts.reference), (CRITIC, facts.critic)):
        if pool is not None:
            slots[name] = _whole(name, (pool[1],) * pool[0])
    if facts.is_reward_shared:
        slots[REWARD] = shared(facts.reward_replicas or len(places))
    elif facts.reward is not None:
        slots[REWARD] = _whole(REWARD, (facts.reward[1],) * facts.reward[0])[
            : facts.reward_replicas
        ]
    return slots


def _whole(pool: str, groups: tuple[int, ...]) -> tuple[Slot, ...]:
    """One slot for each whole device of a pool."""
    return tuple(
        Slot(pool=pool, group=group, bundle=i, share=1.0)
        for group, size in enumerate(groups)
        for i in range(size)
    )


def has_room(facts: PoolFacts, nodes: Sequence[NodeOffer]) -> bool:
    """Whether every group of the pools finds a node with enough devices.

    Example:
        >>> facts = PoolFacts(device="cpu", nnodes=2, per_node=1, replicas=2)
        >>> has_room(facts, [NodeOffer(name="a", cpus=1)])
        False
    """
    pools = sorted(pools_of(facts), key=lambda pool: -pool.groups[0])
    return _shortage(facts.device, pools, nodes) is None


def _shortage(
    device: Device, pools: Sequence[DevicePool], nodes: Sequence[NodeOffer]
) -> UserError | None:
    """What the nodes lack for the groups, placed the largest first; None: nothing."""
    free = {node.name: node.devices(device) for node in nodes}
    for pool in pools:
        for number, size in enumerate(pool.groups, 1):
            # Best fit: the node with the fewest free devices that suffice.
            room = min(
                (left, name) for name, left in (*free.items(), ("", 1 << 60)) if left >= size
            )
            if room[1]:
                free[room[1]] -= size
                continue
            field, fix = _FIELDS[pool.name]
            needed = "; ".join(p.words(device) for p in pools)
            there = ", ".join(f"{n.name[:8]} {n.devices(device)}" for n in nodes) or "no node"
            total = sum(node.devices(device) for node in nodes)
            why = (
                f"the cluster has too few {_unit(device)}. Needed: {needed}; in all "
                f"{sum(p.devices for p in pools)}. There are: {there}; in all {total}. Group "
                f"{number} of {pool.name} finds no node with {size} left"
            )
            return UserError(field, size, why, fix)
    return None


def _unit(device: Device) -> str:
    return "GPUs" if device == "cuda" else "cores"
