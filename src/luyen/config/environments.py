"""`multi_turn.environments`, read: what is in it, and what is wrong with it."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from pydantic import ValidationError

from luyen.base.suggest import did_you_mean
from luyen.config.schema.rollout import EnvironmentChoice, MultiTurn

KNOBS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "user": ((), ("replies", "replies_key")),
    "class": (("path", "name"), ("kwargs",)),
    "interaction": (("class_name",), ("config",)),
    "reasoning_gym": ((), ("dataset", "config", "attempts", "feedback")),
    "verifiers": (("id",), ("args",)),
}
"""Kind of ours -> the arguments it needs, and those it may be given; a test holds them equal."""
PACKAGES = {"reasoning_gym": ("reasoning_gym", "tasks"), "verifiers": ("verifiers", "environments")}
"""Kind -> the package it needs, and the extra that brings it."""


def wrong_knobs(choice: EnvironmentChoice) -> Iterator[tuple[str, str]]:
    """What is wrong with the arguments of a world of our own, and what to do.

    Example:
        >>> [why for why, _ in wrong_knobs(EnvironmentChoice(kind="verifiers"))]
        ['an environment of kind `verifiers` needs `id`']
    """
    needed, others = KNOBS.get(choice.kind, ((), tuple(choice.kwargs)))
    for knob in choice.kwargs:
        if knob not in (*needed, *others):
            why = f"an environment of kind `{choice.kind}` takes no `{knob}`"
            yield why, did_you_mean(knob, (*needed, *others))
    for knob in needed:
        if knob not in choice.kwargs:
            yield f"an environment of kind `{choice.kind}` needs `{knob}`", f"set kwargs.{knob}"


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
