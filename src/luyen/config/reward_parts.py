"""`reward.components` and `reward.routes`, read: what is in them, and what is wrong with them."""

from collections.abc import Mapping
from typing import Any, cast

from pydantic import ValidationError

from luyen.config.schema.reward import Component, Reward


def read_components(reward: Reward) -> tuple[dict[str, Component], list[str]]:
    """The components by name, and a sentence for each that is not well formed.

    Example:
        >>> read_components(Reward(components={"right": {"rule": "exact"}}))[0]["right"].weight
        1.0
        >>> read_components(Reward(components={"right": {"rule": "exact", "wieght": 2}}))[1]
        ['`right`: wieght: Extra inputs are not permitted']
    """
    components: dict[str, Component] = {}
    wrong: list[str] = []
    for name, written in reward.components.items():
        if "/" in name or not name:
            wrong.append(f"`{name}`: a name is not empty and holds no `/`")
        elif not isinstance(written, Mapping):
            wrong.append(f"`{name}`: expected {{rule: RULE, weight: 1.0, kwargs: {{...}}}}")
        else:
            try:
                components[name] = Component.model_validate(dict(cast(Mapping[str, Any], written)))
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"])
                wrong.append(f"`{name}`: {where}: {first['msg']}")
    return components, wrong


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
