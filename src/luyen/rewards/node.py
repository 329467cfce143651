"""A node of the reward tree as it is judged: where its value comes from and what is done to it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import final

from luyen.base.errors import UserError
from luyen.base.records import Score
from luyen.config.reward_parts import judging_order
from luyen.config.schema.reward import Component
from luyen.rewards.conditions import Condition, conditions
from luyen.rewards.protocol import Reward
from luyen.rewards.shares import rescaled


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node, with what it needs to be judged.

    Example:
        >>> Node(path="style/brief", component=Component(rule="length")).name
        'brief'
    """

    path: str
    """Its name, after the names of the nodes above it."""
    component: Component
    """What the configuration says about it."""
    source: Reward | None = None
    """What judges it; None for a node of parts."""
    waves: "tuple[tuple[Node, ...], ...]" = ()
    """The nodes below it, those that can be judged side by side together."""
    order: tuple[str, ...] = ()
    """Names of the nodes below, as written."""
    wanted: tuple[Condition, ...] = ()
    """When it counts."""

    @property
    def name(self) -> str:
        """What it is called in the tree."""
        return self.path.rpartition("/")[2]

    def unjudged(self, siblings: Mapping[str, Score]) -> Score | None:
        """Its score where it does not count beside these siblings; None where it is to be judged.

        Behind a closed gate it is worth what the gate says. Where a sibling that decides has no
        value it has none either: nobody knows whether it would count. Siblings are compared as
        judged, scaled and clipped but not normalised.
        """
        made = Score(name=self.name, value=0.0, weight=self.component.weight, gated=True)
        lost = next((c.by for c in self.wanted if siblings[c.by].value is None), None)
        if lost is not None:
            return replace(made, value=None, error=f"not judged, because `{lost}` has no value")
        closed = [c for c in self.wanted if not c.is_met(siblings[c.by].value or 0.0)]
        return replace(made, value=closed[0].otherwise) if closed else None

    def shaped(self, score: Score) -> Score:
        """What was judged as the node's score: scaled, shifted and clipped; a fault stays one.

        A clip takes from every turn alike.
        """
        own = replace(
            score,
            name=self.name,
            weight=self.component.weight,
            raw=None,
            gated=False,
            turned=self.component.scale < 0,
        )
        if own.value is None:
            return replace(own, error=own.error or "it has no value and does not say why")
        value = shape(self.component, own.value)
        if not math.isfinite(value):
            return replace(own, value=None, error=f"{own.value} was judged: not a finite value")
        if value == own.value:
            return own
        unclipped = self.component.scale * own.value + self.component.shift
        kept = value / unclipped if unclipped else 0.0
        return rescaled(own, value, factor=self.component.scale * (kept if 0 <= kept <= 1 else 0))


def shape(component: Component, value: float) -> float:
    """A value as judged, after scale, shift, floor and ceiling; NaN stays NaN.

    Example:
        >>> shape(Component(rule="length", scale=2.0, floor=-1.0), -0.75)
        -1.0
    """
    value = component.scale * value + component.shift
    if component.floor is not None and value < component.floor:
        value = component.floor
    if component.ceiling is not None and value > component.ceiling:
        value = component.ceiling
    return value


def node_of(
    path: str,
    component: Component,
    leaf: Callable[[str, Component], Reward],
    wanted: tuple[Condition, ...] = (),
) -> Node:
    """The node that a component describes, with those below it; `leaf` makes their sources."""
    if component.parts is None:
        return Node(path=path, component=component, source=leaf(path, component), wanted=wanted)
    waves, order = below(path, component.parts, component.combine, leaf)
    return Node(path=path, component=component, waves=waves, order=order, wanted=wanted)


def below(
    path: str,
    components: Mapping[str, Component],
    combine: str,
    leaf: Callable[[str, Component], Reward],
) -> tuple[tuple[tuple[Node, ...], ...], tuple[str, ...]]:
    """Siblings as nodes, in waves, and their names as written."""
    above = f"{path}/" if path else ""
    made = {
        name: node_of(f"{above}{name}", component, leaf, conditions(name, components, combine))
        for name, component in components.items()
    }
    waves = tuple(tuple(made[n] for n in wave) for wave in judging_order(components, combine))
    lost = [name for name in components if not any(part.name == name for w in waves for part in w)]
    if lost:
        why = f"the gates of {', '.join(lost)} look at no sibling, or wait for one another"
        fix = "let a gate look at a sibling that is judged without it"
        raise UserError("reward.components", path or lost[0], why, fix)
    return waves, tuple(components)
