"""`multi_turn.environments`, read: what is in it, and what is wrong with it."""

from collections.abc import Mapping
from typing import Any, cast

from pydantic import ValidationError

from luyen.config.schema.rollout import EnvironmentChoice, MultiTurn


def read_environments(multi_turn: MultiTurn) -> tuple[dict[str, EnvironmentChoice], list[str]]:
    """The worlds by name, and a sentence for each that is not well formed.

    Example:
        >>> read_environments(MultiTurn(environments={"clerk": {"kind": "user"}}))[0]["clerk"].kind
        'user'
        >>> read_environments(MultiTurn(environments={"clerk": {"knid": "user"}}))[1][0]
        '`clerk`: kind: Field required'
    """
    found: dict[str, EnvironmentChoice] = {}
    wrong: list[str] = []
    for name, written in multi_turn.environments.items():
        if not isinstance(written, Mapping):
            wrong.append(f"`{name}`: expected {{kind: KIND, kwargs: {{...}}}}")
            continue
        try:
            given = dict(cast(Mapping[str, Any], written))
            found[name] = EnvironmentChoice.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            wrong.append(f"`{name}`: {where}: {first['msg']}")
    return found, wrong
