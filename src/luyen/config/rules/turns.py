"""T: multi-turn conversations with tools, and the data they need."""

from collections.abc import Iterator

from luyen.base.paths import exists
from luyen.config.rules.rule import Finding, Situation, rule

_TURNS = "actor_rollout_ref.rollout.multi_turn"
_ROOM_FOR_TOOLS = 1024


@rule("T01", "error")
def tools_need_messages(s: Situation) -> Iterator[Finding]:
    """Tool-calling keeps conversations as messages."""
    multi_turn = s.config.actor_rollout_ref.rollout.multi_turn
    if multi_turn.enable and not s.config.data.return_raw_chat:
        yield Finding(
            field="data.return_raw_chat",
            why="multi-turn rollouts extend the conversation; as plain text its structure is lost",
            fix="set it to true",
        )


@rule("T02", "error")
def truncation_spares_tool_schemas(s: Situation) -> Iterator[Finding]:
    """A prompt that carries tool schemas is never cut."""
    data, multi_turn = s.config.data, s.config.actor_rollout_ref.rollout.multi_turn
    if multi_turn.enable and data.truncation != "error" and not data.filter_overlong_prompts:
        yield Finding(
            field="data.truncation",
            why=f"cutting a prompt of more than {data.max_prompt_length} tokens on the "
            f"{data.truncation} can remove the tool schemas: calls then fail and rewards are wrong",
            fix="set filter_overlong_prompts=true, or truncation=error and a larger maximum",
        )


@rule("T03", "warning")
def prompt_has_room_for_tools(s: Situation) -> Iterator[Finding]:
    """Prompts with tool schemas get room for them."""
    data, multi_turn = s.config.data, s.config.actor_rollout_ref.rollout.multi_turn
    if multi_turn.tool_config_path and data.max_prompt_length < _ROOM_FOR_TOOLS:
        yield Finding(
            field="data.max_prompt_length",
            why=f"tool schemas are part of the prompt and often take several hundred tokens; "
            f"prompts above {data.max_prompt_length} are dropped or refused",
            fix=f"set it to {_ROOM_FOR_TOOLS} or more, or look at the filter's count",
        )


@rule("T04", "warning")
def turns_have_tools_or_users(s: Situation) -> Iterator[Finding]:
    """A multi-turn run has tools to call or a user to answer."""
    multi_turn = s.config.actor_rollout_ref.rollout.multi_turn
    if multi_turn.enable and not multi_turn.tool_config_path and multi_turn.max_user_turns is None:
        yield Finding(
            field=f"{_TURNS}.tool_config_path",
            why="no tools are given and no user turns: every rollout ends after one turn",
            fix="set tool_config_path, or drop multi_turn.enable",
        )


@rule("T05", "error")
def tool_file_exists(s: Situation) -> Iterator[Finding]:
    """The file that lists the tools is there."""
    multi_turn = s.config.actor_rollout_ref.rollout.multi_turn
    path = multi_turn.tool_config_path
    if multi_turn.enable and path is not None and not exists(path):
        yield Finding(
            field=f"{_TURNS}.tool_config_path",
            why="no such file on this machine",
            fix="give the path of a YAML file that lists the tools",
        )


@rule("T06", "warning")
def turn_knob_has_effect(s: Situation) -> Iterator[Finding]:
    """Keys of `multi_turn` are changed only when it is enabled."""
    multi_turn = s.config.actor_rollout_ref.rollout.multi_turn
    read = {
        "tool_config_path": multi_turn.tool_config_path,
        "max_assistant_turns": multi_turn.max_assistant_turns,
        "max_user_turns": multi_turn.max_user_turns,
    }
    for name in read:
        if not multi_turn.enable and s.is_changed(f"{_TURNS}.{name}"):
            yield Finding(
                field=f"{_TURNS}.{name}",
                why="multi_turn.enable is false, so it has no effect",
                fix=f"drop it, or set {_TURNS}.enable=true",
            )


@rule("T07", "warning")
def turns_share_the_response(s: Situation) -> Iterator[Finding]:
    """All turns of a conversation share `max_response_length`."""
    data, multi_turn = s.config.data, s.config.actor_rollout_ref.rollout.multi_turn
    turns = multi_turn.max_assistant_turns
    if multi_turn.enable and turns is not None and data.max_response_length // turns < 64:
        yield Finding(
            field="data.max_response_length",
            why=f"{turns} assistant turns and their tool results share {data.max_response_length} "
            f"tokens: {data.max_response_length // turns} a turn",
            fix="raise max_response_length, or lower max_assistant_turns",
        )
