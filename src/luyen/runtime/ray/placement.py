"""Pools as placement groups of a cluster, and the options that put an actor in its slot."""

from collections.abc import Mapping
from typing import Any, final

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from luyen.base.errors import UserError
from luyen.runtime.ray.pools import Device, Pools, Slot

_WAIT_S = 120.0


@final
class Placed:
    """Devices that are taken from the cluster until `free`, or until this process ends.

    The devices of a group lie on one node. When a node is lost, Ray moves its groups to another
    with room, and actors that are begun again follow.
    """

    def __init__(self, pools: Pools, *, wait_s: float = _WAIT_S) -> None:
        """Take them, the largest groups first; a UserError when others hold them for too long."""
        self._device: Device = pools.device
        self._groups: dict[tuple[str, int], PlacementGroup] = {}
        bundle = {"CPU": 1.0, "GPU": 1.0} if pools.device == "cuda" else {"CPU": 1.0}
        for pool in pools.pools:
            for number, size in enumerate(pool.groups):
                group = placement_group([bundle] * size, strategy="STRICT_PACK")
                self._groups[pool.name, number] = group
                if not group.wait(timeout_seconds=wait_s):
                    self.free()
                    free = ray.available_resources()
                    left = {name: free.get(name, 0.0) for name in bundle}
                    why = (
                        f"group {number + 1} of pool {pool.name} ({size} x {bundle} on one node) "
                        f"was not to be had in {wait_s:.0f} s; free in all nodes: {left}"
                    )
                    fix = "wait for what else runs on the cluster, or ask for less"
                    raise UserError("trainer.nnodes", len(pool.groups), why, fix)

    def options(self, slot: Slot) -> Mapping[str, Any]:
        """Options of the actor that is to run in a slot."""
        where = PlacementGroupSchedulingStrategy(
            self._groups[slot.pool, slot.group], placement_group_bundle_index=slot.bundle
        )
        gpus = {"num_gpus": slot.share} if self._device == "cuda" else {}
        return {"num_cpus": slot.share, "scheduling_strategy": where, **gpus}

    def free(self) -> None:
        """Give everything back; actors in it end. Freeing twice is allowed."""
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups = {}
