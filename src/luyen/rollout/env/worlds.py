"""Which world a prompt's conversations happen in."""

import inspect
from collections.abc import Mapping, Sequence
from typing import final

from luyen.base.errors import UserError
from luyen.base.faults import last_line
from luyen.base.foreign import boundary, own_copy
from luyen.base.records import Prompt
from luyen.base.suggest import did_you_mean
from luyen.config.schema.rollout import EnvironmentChoice
from luyen.rollout.env.protocol import Env, envs
from luyen.rollout.tools.protocol import Tool

_FIELD = "actor_rollout_ref.rollout.multi_turn.environments"
ROW_KEY = "environment"
"""Where a row says which world it belongs to."""


@final
class Worlds:
    """The worlds of a run by name. Each conversation gets a fresh one.

    Example:
        >>> worlds = Worlds({}, default=None)
        >>> from luyen.base.records import make_prompt
        >>> worlds.make(make_prompt([{"role": "user", "content": "Hi"}])) is None
        True
    """

    def __init__(self, choices: Mapping[str, EnvironmentChoice], *, default: str | None) -> None:
        """`default` is the world of rows that name none; a UserError for knobs nobody knows."""
        for name, choice in choices.items():
            _check_knobs(name, choice)
        self._choices = dict(choices)
        self._default = default
        self._tools: dict[str, tuple[Tool, ...]] = {}

    @property
    def are_any(self) -> bool:
        """Whether a prompt may have one."""
        return bool(self._choices)

    def name_of(self, prompt: Prompt) -> str | None:
        """The world that a prompt belongs to; None: it has none."""
        interaction = prompt.extra_info.get("interaction_kwargs")
        named = prompt.extra_info.get(ROW_KEY)
        if named is None and isinstance(interaction, Mapping):
            named = interaction.get("name")  # pyright: ignore[reportUnknownMemberType]
        name = self._default if named is None else str(named)
        if name is not None and name not in self._choices:
            why = "a row names a world that the run does not have"
            raise UserError(_FIELD, name, why, did_you_mean(name, self._choices))
        return name

    def make(self, prompt: Prompt) -> Env | None:
        """A fresh world for one conversation."""
        name = self.name_of(prompt)
        if name is None:
            return None
        choice = self._choices[name]
        return envs.get(choice.kind)(**own_copy(choice.kwargs))

    def tools_of(self, prompt: Prompt) -> Sequence[Tool]:
        """Tools that the prompt's world brings."""
        name = self.name_of(prompt)
        if name is None:
            return ()
        if name not in self._tools:
            self._tools[name] = self._made_tools(prompt, name)
        return self._tools[name]

    def _made_tools(self, prompt: Prompt, name: str) -> tuple[Tool, ...]:
        faults: list[BaseException] = []
        with boundary(faults):
            made = self.make(prompt)
            return () if made is None else tuple(made.tools)
        if isinstance(faults[0], UserError):
            raise faults[0]
        why = f"making it failed: {last_line(faults[0])}"
        fix = "mend the environment or its kwargs"
        raise UserError(f"{_FIELD}.{name}", self._choices[name].kind, why, fix) from faults[0]


def _check_knobs(name: str, choice: EnvironmentChoice) -> None:
    parameters = inspect.signature(envs.get(choice.kind)).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for knob in choice.kwargs:
        if knob not in parameters:
            why = f"an environment of kind `{choice.kind}` takes no such argument"
            fix = did_you_mean(knob, parameters)
            raise UserError(f"{_FIELD}.{name}.kwargs", knob, why, fix)
    for knob, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and knob not in choice.kwargs:
            why = f"an environment of kind `{choice.kind}` needs `{knob}`"
            raise UserError(f"{_FIELD}.{name}.kwargs", dict(choice.kwargs), why, f"set {knob}")
