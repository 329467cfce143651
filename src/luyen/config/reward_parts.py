"""`reward.components` and `reward.routes`, read: what is in them, and what is wrong with them."""

from collections.abc import Iterator, Mapping
from math import inf
from typing import Any, cast

from pydantic import ValidationError

from luyen.config.schema.reward import Component, Gate, Reward

_NO_NAME = "a name is not empty and holds no `/`"


def read_components(reward: Reward) -> tuple[dict[str, Component], list[str]]:
    """The components by name, and a sentence for each that is not well formed.

    A learned reward that is on, where nothing else is said to judge, is the one component.

    Example:
        >>> read_components(Reward(components={"right": {"rule": "exact"}}))[0]["right"].weight
        1.0
        >>> read_components(Reward(components={"right": {"rule": "exact", "wieght": 2}}))[1]
        ['`right`: wieght: Extra inputs are not permitted']
    """
    if is_model_alone(reward):
        return {"reward_model": Component(model="reward_model")}, []
    components: dict[str, Component] = {}
    wrong: list[str] = []
    for name, written in reward.components.items():
        if not _is_name(name):
            wrong.append(f"`{name}`: {_NO_NAME}")
            continue
        if not isinstance(written, Mapping):
            wrong.append(f"`{name}`: expected {{rule: RULE, weight: 1.0, kwargs: {{...}}}}")
            continue
        try:
            read = Component.model_validate(dict(cast(Mapping[str, Any], written)))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            wrong.append(f"`{name}`: {where}: {first['msg']}")
            continue
        faults = [why for path, node in nodes({name: read}) for why in _misshapen(path, node)]
        wrong += faults
        if not faults:
            components[name] = read
    return components, wrong


def is_model_alone(reward: Reward) -> bool:
    """Whether the learned reward judges every row, and nothing else does."""
    own = reward.custom_reward_function.path is not None
    return reward.reward_model.enable and not (reward.components or reward.routes or own)


def nodes(components: Mapping[str, Component], above: str = "") -> Iterator[tuple[str, Component]]:
    """Every node of a tree by its path, the one above before those below.

    Example:
        >>> tree = {"style": Component(parts={"brief": Component(rule="length")})}
        >>> [path for path, _ in nodes(tree)]
        ['style', 'style/brief']
    """
    for name, component in components.items():
        yield f"{above}{name}", component
        yield from nodes(component.parts or {}, f"{above}{name}/")


def _misshapen(path: str, node: Component) -> Iterator[str]:
    """What is wrong with one node, whatever the others are."""
    for part in node.parts or {}:
        if not _is_name(part):
            yield f"`{path}`: parts: `{part}`: {_NO_NAME}"
    sources = (node.rule, node.judge, node.model, node.parts)
    if sum(source is not None for source in sources) != 1:
        yield f"`{path}`: it has exactly one of rule, judge, model and parts"
    if node.parts == {}:
        yield f"`{path}`: parts: there is none"
    if node.kwargs and node.rule is None:
        yield f"`{path}`: kwargs are knobs of a rule, and it has none"
    if node.combine != "sum" and node.parts is None:
        yield f"`{path}`: combine is about parts, and it has none"
    if node.floor is not None and node.ceiling is not None and node.floor > node.ceiling:
        yield f"`{path}`: floor {node.floor:g} lies above ceiling {node.ceiling:g}"
    gate = node.gate
    if gate is not None and gate.below is not None and gate.below <= opens_at(gate):
        yield f"`{path}`: gate: no value is at least {opens_at(gate):g} and below {gate.below:g}"


def _is_name(name: str) -> bool:
    return bool(name) and "/" not in name


def opens_at(gate: Gate) -> float:
    """The least value of the sibling with which a gate is open."""
    if gate.at_least is not None:
        return gate.at_least
    return 1.0 if gate.below is None else -inf


def judging_order(components: Mapping[str, Component], combine: str) -> list[tuple[str, ...]]:
    """Siblings in waves: each needs only what stands before it. Short when they need each other.

    Example:
        >>> siblings = {"polite": Component(rule="json", gate=Gate(by="right")),
        ...             "right": Component(rule="exact")}
        >>> judging_order(siblings, "sum")
        [('right',), ('polite',)]
    """
    waves: list[tuple[str, ...]] = []
    known: set[str] = set()
    while True:
        ready = [
            n for n in components if n not in known and needed(n, components, combine) <= known
        ]
        if not ready:
            return waves
        waves.append(tuple(ready))
        known |= set(ready)


def needed(name: str, components: Mapping[str, Component], combine: str) -> set[str]:
    """The siblings that must be judged before a node, so that it is known whether it counts."""
    gate = components[name].gate
    found = set[str]() if gate is None else {gate.by}
    if combine == "lexicographic":
        names = list(components)
        found |= set(names[: names.index(name)])
    return found


def read_routes(reward: Reward) -> dict[str, tuple[str, ...]]:
    """Pattern of a data source -> names of components or rules.

    Example:
        >>> read_routes(Reward(routes={"math*": ["math", "brief"], "sum": "exact"}))
        {'math*': ('math', 'brief'), 'sum': ('exact',)}
    """
    return {str(pattern): _names(named) for pattern, named in reward.routes.items()}


def _names(named: Any) -> tuple[str, ...]:
    if isinstance(named, list | tuple):
        return tuple(str(name) for name in cast(list[Any], named))
    return (str(named),)
