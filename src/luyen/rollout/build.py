"""From the `multi_turn` block to the conversations of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.records import Prompt
from luyen.config.environments import read_environments
from luyen.config.interaction_file import read_interactions
from luyen.config.schema.rollout import MultiTurn
from luyen.data.render import Renderer
from luyen.rollout.env.all import envs
from luyen.rollout.env.worlds import Worlds
from luyen.rollout.fault_policy import FaultPolicy
from luyen.rollout.loop import TurnLimits
from luyen.rollout.multi_turn import Conversations
from luyen.rollout.openings import Openings
from luyen.rollout.parsers.all import tool_parsers
from luyen.rollout.setting import Setting, ending_s
from luyen.rollout.tools.box import ToolBox
from luyen.rollout.tools.config import load_tools

ENVS = envs
"""Importing it registers the environments that come with the package."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What conversations meet: tools and worlds.

    Example:
        >>> build_surroundings(MultiTurn(enable=True)).tools.names
        ()
    """

    tools: ToolBox
    """What may be called."""
    worlds: Worlds
    """What answers."""

    def offered(self, prompt: Prompt) -> tuple[Mapping[str, Any], ...]:
        """Schemas for a prompt: of the tools that its row names (none named: all), and its world's.

        A UserError when the row names a tool that the run does not have.
        """
        besides = self.worlds.tools_of(prompt)
        own = {tool.name for tool in besides}
        named = [schema.get("function", schema)["name"] for schema in prompt.tools]
        names = [name for name in named if name not in own] if named else None
        return self.tools.schemas(names, besides=besides)


def stop_tokens(multi_turn: MultiTurn) -> tuple[str, ...]:
    """Tokens that end a turn in the run's format of tool calls, besides the tokenizer's own."""
    if not multi_turn.enable:
        return ()
    return tuple(tool_parsers.facts(multi_turn.format).get("stop_tokens", ()))


def build_surroundings(multi_turn: MultiTurn) -> Surroundings:
    """Tools and worlds, made and checked; nothing is started yet."""
    choices, wrong = read_environments(multi_turn)
    if wrong:
        field = "actor_rollout_ref.rollout.multi_turn.environments"
        raise UserError(field, multi_turn.environments, wrong[0], "mend the environment")
    if multi_turn.interaction_config_path is not None:
        choices |= read_interactions(multi_turn.interaction_config_path)
    tools = load_tools(
        tool_config_path=multi_turn.tool_config_path,
        function_tool_path=multi_turn.function_tool_path,
        timeout_s=multi_turn.tool_timeout_s,
    )
    return Surroundings(
        tools=ToolBox(
            tools,
            max_tool_response_length=multi_turn.max_tool_response_length,
            tool_response_truncate_side=multi_turn.tool_response_truncate_side,
            arguments_are_text=tool_parsers.facts(multi_turn.format).get("values") == "text",
            on_error=multi_turn.on_tool_error,
            timeout_s=multi_turn.tool_timeout_s,
            end_s=ending_s(multi_turn.time_budget_s),
        ),
        worlds=Worlds(choices, default=multi_turn.environment),
    )


def build_conversations(
    multi_turn: MultiTurn,
    surroundings: Surroundings,
    *,
    renderer: Renderer,
    max_prompt_length: int,
    max_response_length: int,
) -> Conversations:
    """What plays the rollouts of a run."""
    setting = Setting(
        renderer=renderer,
        openings=Openings(renderer),
        parser=tool_parsers.get(multi_turn.format),
        tools=surroundings.tools,
        make_env=surroundings.worlds.make,
        has_worlds=surroundings.worlds.are_any,
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
    return Conversations(setting, policy)
