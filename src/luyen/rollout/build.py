"""From the `multi_turn` block to the tools, environments and conversations of a run."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from luyen.base.boundary import boundary, last_line, own_copy
from luyen.base.errors import UserError, did_you_mean
from luyen.base.records import Prompt
from luyen.config.environments import read_environments, read_interactions
from luyen.config.schema.actor_rollout_ref import EnvironmentConfig, MultiTurnConfig
from luyen.data.render import Renderer
from luyen.rollout.conversation_config import ConversationConfig, PromptTokenCache, ending_s
from luyen.rollout.conversation_state import TurnLimits
from luyen.rollout.env import class_env, interactions, reasoning_gym, verifiers_env
from luyen.rollout.env.protocol import Env, envs
from luyen.rollout.multi_turn import Conversations, FaultPolicy
from luyen.rollout.parsers import json_formats, llama3, tag_formats
from luyen.rollout.parsers.protocol import tool_parsers
from luyen.rollout.tools.protocol import Tool
from luyen.rollout.tools.registry import ToolRegistry
from luyen.rollout.tools.tool_file import load_tools

_FIELD = "actor_rollout_ref.rollout.multi_turn.environments"
ROW_KEY = "environment"
"""Key of a row's `extra_info` that names its environment."""


@final
class EnvSelector:
    """The environments of a run by name; every conversation gets a new instance.

    Example:
        >>> env_selector = EnvSelector({}, default=None)
        >>> from luyen.base.records import make_prompt
        >>> env_selector.make(make_prompt([{"role": "user", "content": "Hi"}])) is None
        True
    """

    def __init__(self, choices: Mapping[str, EnvironmentConfig], *, default: str | None) -> None:
        """`default` is for rows that name none; a UserError for unknown or missing kwargs."""
        for name, choice in choices.items():
            _check_kwargs(name, choice)
        self._choices = dict(choices)
        self._default = default
        self._tools: dict[str, tuple[Tool, ...]] = {}

    @property
    def has_any(self) -> bool:
        """Whether a prompt may have an environment."""
        return bool(self._choices)

    def name_of(self, prompt: Prompt) -> str | None:
        """Name of a prompt's environment; None: it has none."""
        interaction = prompt.extra_info.get("interaction_kwargs")
        named = prompt.extra_info.get(ROW_KEY)
        if named is None and isinstance(interaction, Mapping):
            named = interaction.get("name")  # pyright: ignore[reportUnknownMemberType]
        name = self._default if named is None else str(named)
        if name is not None and name not in self._choices:
            why = "a row names an environment that the run does not have"
            raise UserError(_FIELD, name, why, did_you_mean(name, self._choices))
        return name

    def make(self, prompt: Prompt) -> Env | None:
        """A new environment for one conversation."""
        name = self.name_of(prompt)
        if name is None:
            return None
        choice = self._choices[name]
        return envs.get(choice.kind)(**own_copy(choice.kwargs))

    def tools_of(self, prompt: Prompt) -> Sequence[Tool]:
        """Tools of the prompt's environment."""
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
        fix = "fix the environment or its kwargs"
        raise UserError(f"{_FIELD}.{name}", self._choices[name].kind, why, fix) from faults[0]


def _check_kwargs(name: str, choice: EnvironmentConfig) -> None:
    parameters = inspect.signature(envs.get(choice.kind)).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for argument in choice.kwargs:
        if argument not in parameters:
            why = f"an environment of kind `{choice.kind}` takes no such argument"
            fix = did_you_mean(argument, parameters)
            raise UserError(f"{_FIELD}.{name}.kwargs", argument, why, fix)
    for argument, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and argument not in choice.kwargs:
            why = f"an environment of kind `{choice.kind}` needs `{argument}`"
            raise UserError(f"{_FIELD}.{name}.kwargs", dict(choice.kwargs), why, f"set {argument}")


# Importing these modules registers the environments and the tool call formats.

ENV_MODULES = (class_env, reasoning_gym, interactions, verifiers_env)
PARSER_MODULES = (json_formats, tag_formats, llama3)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEnvironment:
    """The tools and environments of a run.

    Example:
        >>> build_tool_environment(MultiTurnConfig(enable=True)).tools.names
        ()
    """

    tools: ToolRegistry
    """Its tools."""
    env_selector: EnvSelector
    """Its environments."""

    def offered(self, prompt: Prompt) -> tuple[Mapping[str, Any], ...]:
        """Tool schemas of a prompt: of the tools that its row names (none: all) and of its env.

        A UserError when the row names a tool that the run does not have.
        """
        extra = self.env_selector.tools_of(prompt)
        own = {tool.name for tool in extra}
        named = [schema.get("function", schema)["name"] for schema in prompt.tools]
        names = [name for name in named if name not in own] if named else None
        return self.tools.schemas(names, extra=extra)


def stop_tokens(multi_turn: MultiTurnConfig) -> tuple[str, ...]:
    """Special tokens of the tool call format that end a turn, like the tokenizer's own."""
    if not multi_turn.enable:
        return ()
    return tuple(tool_parsers.facts(multi_turn.format).get("stop_tokens", ()))


def build_tool_environment(multi_turn: MultiTurnConfig) -> ToolEnvironment:
    """Build and check tools and environments; MCP servers are started."""
    choices, wrong = read_environments(multi_turn)
    if wrong:
        field = "actor_rollout_ref.rollout.multi_turn.environments"
        raise UserError(field, multi_turn.environments, wrong[0], "fix the environment")
    if multi_turn.interaction_config_path is not None:
        choices |= read_interactions(multi_turn.interaction_config_path)
    tools = load_tools(
        tool_config_path=multi_turn.tool_config_path,
        function_tool_path=multi_turn.function_tool_path,
        timeout_s=multi_turn.tool_timeout_s,
    )
    return ToolEnvironment(
        tools=ToolRegistry(
            tools,
            max_tool_response_length=multi_turn.max_tool_response_length,
            tool_response_truncate_side=multi_turn.tool_response_truncate_side,
            arguments_are_text=tool_parsers.facts(multi_turn.format).get("values") == "text",
            on_error=multi_turn.on_tool_error,
            timeout_s=multi_turn.tool_timeout_s,
            end_s=ending_s(multi_turn.time_budget_s),
        ),
        env_selector=EnvSelector(choices, default=multi_turn.environment),
    )


def build_conversations(
    multi_turn: MultiTurnConfig,
    tool_env: ToolEnvironment,
    *,
    renderer: Renderer,
    max_prompt_length: int,
    max_response_length: int,
) -> Conversations:
    """The conversations of a run, from its `multi_turn` block."""
    config = ConversationConfig(
        renderer=renderer,
        prompt_cache=PromptTokenCache(renderer),
        parser=tool_parsers.get(multi_turn.format),
        tools=tool_env.tools,
        make_env=tool_env.env_selector.make,
        has_envs=tool_env.env_selector.has_any,
        limits=TurnLimits(
            max_assistant_turns=multi_turn.max_assistant_turns,
            max_user_turns=multi_turn.max_user_turns,
            max_tool_calls=multi_turn.max_tool_calls,
            max_parallel_calls=multi_turn.max_parallel_calls,
            on_parse_failure=multi_turn.on_parse_failure,
        ),
        max_prompt_length=max_prompt_length,
        max_response_length=max_response_length,
        time_budget_s=multi_turn.time_budget_s,
        sanity=multi_turn.tokenization_sanity_check_mode,
        on_unknown=multi_turn.on_unknown,
    )
    policy = FaultPolicy(
        on_fault=multi_turn.on_fault,
        retries=multi_turn.fault_retries,
        min_samples=multi_turn.min_samples,
    )
    return Conversations(config, policy)
