"""User simulators written for verl: start, generate_response, calculate_score, finalize."""

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import count
from typing import Any, cast, final

import yaml

from luyen.base.errors import UserError
from luyen.base.paths import expanded
from luyen.base.records import Message, Prompt
from luyen.base.suggest import did_you_mean
from luyen.config.schema.rollout import EnvironmentChoice
from luyen.rollout.env.protocol import Observation, envs
from luyen.rollout.tools.protocol import Tool

_FIELD = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
_KEYS = ("name", "class_name", "config")
_FIX = "write interaction: [{name: NAME, class_name: PACKAGE.MODULE.CLASS, config: {...}}]"
_numbers = count()
"""Instance ids are never used twice in a process."""


def interactions(path: str) -> dict[str, EnvironmentChoice]:
    """The users that a file of verl lists, by name; a UserError names the entry that is wrong."""
    try:
        page: Any = yaml.safe_load(expanded(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(_FIELD, path, f"it cannot be read: {error}", _FIX) from error
    listed = cast(Mapping[str, Any], page).get("interaction") if isinstance(page, Mapping) else None
    if not isinstance(listed, list) or not listed:
        raise UserError(_FIELD, path, "it lists no interactions", _FIX)
    found: dict[str, EnvironmentChoice] = {}
    for number, raw in enumerate(cast(list[Any], listed), start=1):
        where = f"{path}: interaction {number}"
        if not isinstance(raw, Mapping) or "class_name" not in raw:
            raise UserError(where, raw, "an entry names its class", _FIX)
        entry = cast(Mapping[str, Any], raw)
        unknown = [key for key in entry if key not in _KEYS]
        if unknown:
            raise UserError(where, unknown[0], "no such key", did_you_mean(unknown[0], _KEYS))
        class_name = str(entry["class_name"])
        name = str(entry.get("name") or class_name.rpartition(".")[2].lower())
        if name in found:
            raise UserError(where, name, "two interactions have this name", "rename one of them")
        kwargs = {"class_name": class_name, "config": dict(entry.get("config") or {})}
        found[name] = EnvironmentChoice(kind="interaction", kwargs=kwargs)
    return found


@final
class Interaction:
    """One conversation with such a user."""

    def __init__(self, made: Any) -> None:
        """`made` is an object of the user's class; instance ids tell its conversations apart."""
        self._made = made
        self._instance = ""
        self._given: dict[str, Any] = {}

    @property
    def tools(self) -> Sequence[Tool]:
        """A user brings none."""
        return ()

    async def open(self, prompt: Prompt, key: int) -> Sequence[Message]:
        """Start with what the row gives; the prompt is as it is."""
        given: Any = prompt.extra_info.get("interaction_kwargs") or {}
        self._given = {name: value for name, value in dict(given).items() if name != "name"}
        wanted = f"talk-{key:x}-{next(_numbers)}"
        started = await _awaited(self._made.start_interaction(wanted, **self._given))
        self._instance = started if isinstance(started, str) else wanted
        return prompt.messages

    async def act(self, messages: Sequence[Message]) -> Observation:
        """What the user says, and what the turn was worth to them."""
        plain = [{"role": m["role"], "content": m.get("content") or ""} for m in messages]
        returned = await _awaited(
            self._made.generate_response(self._instance, plain, **self._given)
        )
        if not isinstance(returned, tuple) or len(cast(tuple[Any, ...], returned)) < 3:
            said = f"{type(returned).__name__}"
            raise TypeError(f"generate_response gives (is_done, text, score, notes), not {said}")
        is_done, text, score = cast(tuple[Any, ...], returned)[:3]
        reward = None if score is None else float(score)
        if is_done:
            return Observation(is_done=True, reward=reward)
        return Observation(messages=({"role": "user", "content": str(text)},), reward=reward)

    async def score(self) -> float | None:
        """What the user thinks of the whole; scores of turns were given on the way."""
        return None

    async def close(self) -> None:
        """Let the user go."""
        if self._instance and "finalize_interaction" in dir(self._made):
            await _awaited(self._made.finalize_interaction(self._instance))


_made: dict[tuple[str, str], Any] = {}
"""One object for each class and configuration, as verl has it."""


@envs.register("interaction")
def interaction(*, class_name: str, config: Mapping[str, Any] | None = None) -> Interaction:
    """A user written for verl."""
    settings = dict(config or {})
    key = class_name, repr(sorted(settings.items()))
    if key not in _made:
        place, _, name = class_name.rpartition(".")
        try:
            cls: Any = getattr(import_module(place), name)
        except (ImportError, AttributeError, ValueError) as error:
            why = f"no such class can be imported: {error}"
            fix = "give PACKAGE.MODULE.CLASS of an importable class"
            raise UserError(_FIELD, class_name, why, fix) from error
        _made[key] = cls(settings)
    return Interaction(_made[key])


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
