"""When a node of the reward tree counts: what its siblings must be worth."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import final

from luyen.base.bars import reaches
from luyen.config.reward_parts import opens_at
from luyen.config.schema.reward import Component


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A sibling, and the values of it with which a node counts.

    Example:
        >>> Condition(by="right").is_met(1.0), Condition(by="right").is_met(0.5)
        (True, False)
    """

    by: str
    """Name of the sibling."""
    at_least: float = 1.0
    """Least value of it."""
    below: float = inf
    """The value that it does not reach."""
    otherwise: float = 0.0
    """What the node is worth when the condition is not met."""

    def is_met(self, value: float) -> bool:
        """Whether a node counts beside a sibling of this value."""
        return reaches(value, self.at_least) and not reaches(value, self.below)


def conditions(
    name: str, components: Mapping[str, Component], combine: str
) -> tuple[Condition, ...]:
    """When one of several siblings counts: by its gate, and after those that come first."""
    found: list[Condition] = []
    gate = components[name].gate
    if gate is not None:
        below = inf if gate.below is None else gate.below
        found.append(
            Condition(by=gate.by, at_least=opens_at(gate), below=below, otherwise=gate.otherwise)
        )
    if combine == "lexicographic":
        names = list(components)
        earlier = names[: names.index(name)]
        found += [Condition(by=one, at_least=components[one].bar) for one in earlier]
    return tuple(found)
