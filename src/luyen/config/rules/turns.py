"""T: multi-turn conversations with tools, and the data they need."""

from collections.abc import Iterator

from luyen.base.errors import UserError
from luyen.base.paths import exists
from luyen.base.suggest import did_you_mean
from luyen.config.environments import PACKAGES, read_environments, wrong_knobs
from luyen.config.interaction_file import FIELD, read_interactions
from luyen.config.rules.rule import Finding, Situation, rule
from luyen.config.tool_file import tool_file_problems

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


@rule("T03", "note")
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
    sources = (
        multi_turn.tool_config_path,
        multi_turn.function_tool_path,
        multi_turn.environments,
        multi_turn.interaction_config_path,
    )
    if multi_turn.enable and not any(sources):
        yield Finding(
            field=f"{_TURNS}.tool_config_path",
            why="there are no tools and no environments: every rollout ends after one turn",
            fix="set tool_config_path, function_tool_path or environments, or drop enable",
        )


@rule("T05", "error")
def turn_files_exist(s: Situation) -> Iterator[Finding]:
    """The files that list tools and users are there."""
    multi_turn = s.config.actor_rollout_ref.rollout.multi_turn
    paths = {
        "tool_config_path": (multi_turn.tool_config_path, "a YAML file that lists the tools"),
        "function_tool_path": (multi_turn.function_tool_path, "a Python file with tools"),
        "interaction_config_path": (multi_turn.interaction_config_path, "a YAML file of users"),
    }
    for name, (path, what) in paths.items():
        if multi_turn.enable and path is not None and not exists(path):
            yield Finding(
                field=f"{_TURNS}.{name}",
                why="no such file on this machine",
                fix=f"give the path of {what}",
            )


@rule("T06", "warning")
def turn_knob_has_effect(s: Situation) -> Iterator[Finding]:
    """Keys of `multi_turn` are changed only when it is enabled."""
    multi_turn = s.config.actor_rollout_ref.rollout.multi_turn
    for name in type(multi_turn).model_fields:
        if name != "enable" and not multi_turn.enable and s.is_changed(f"{_TURNS}.{name}"):
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


@rule("T08", "error")
def call_format_is_known(s: Situation) -> Iterator[Finding]:
    """`multi_turn.format` is a way to write calls that exists."""
    multi_turn = s.config.actor_rollout_ref.rollout.multi_turn
    if multi_turn.format not in s.known.tool_formats:
        fix = did_you_mean(multi_turn.format, s.known.tool_formats)
        yield Finding(field=f"{_TURNS}.format", why="no such format of tool calls", fix=fix)


@rule("T09", "error")
def environments_are_well_formed(s: Situation) -> Iterator[Finding]:
    """Environments have a known kind, and the one for all rows is among them."""
    multi_turn = s.config.actor_rollout_ref.rollout.multi_turn
    field = f"{_TURNS}.environments"
    found, wrong = read_environments(multi_turn)
    for sentence in wrong:
        yield Finding(field=field, why=sentence, fix="write NAME: {kind: KIND, kwargs: {...}}")
    for name, choice in found.items():
        if choice.kind not in s.known.environments:
            fix = did_you_mean(choice.kind, s.known.environments)
            yield Finding(field=field, why=f"`{name}` has no known kind", fix=fix)
        for why, fix in wrong_knobs(choice) if multi_turn.enable else ():
            yield Finding(field=field, why=f"`{name}`: {why}", fix=fix)
        package, extra = PACKAGES.get(choice.kind, (None, None))
        if multi_turn.enable and package is not None and not s.installed(package):
            why = f"`{name}`: `{choice.kind}` needs the package {package}, not installed here"
            yield Finding(field=field, why=why, fix=f"pip install 'luyen[{extra}]'")
    if multi_turn.environment is not None and multi_turn.environment not in found:
        fix = did_you_mean(multi_turn.environment, found)
        yield Finding(field=f"{_TURNS}.environment", why="no environment of this name", fix=fix)


@rule("T10", "error")
def groups_can_keep_their_minimum(s: Situation) -> Iterator[Finding]:
    """A group has at least as many samples as it must keep."""
    rollout = s.config.actor_rollout_ref.rollout
    multi_turn = rollout.multi_turn
    if multi_turn.enable and multi_turn.min_samples > rollout.n:
        yield Finding(
            field=f"{_TURNS}.min_samples",
            why=f"a group has {rollout.n} samples, so one fault would leave out every group",
            fix=f"set it to {rollout.n} or less",
        )


@rule("T11", "warning")
def retries_have_effect(s: Situation) -> Iterator[Finding]:
    """The number of retries is changed only where rollouts are retried."""
    multi_turn = s.config.actor_rollout_ref.rollout.multi_turn
    is_read = multi_turn.enable and multi_turn.on_fault == "retry"
    if multi_turn.enable and not is_read and s.is_changed(f"{_TURNS}.fault_retries"):
        yield Finding(
            field=f"{_TURNS}.fault_retries",
            why=f"on_fault is {multi_turn.on_fault}, so nothing is played again",
            fix="drop it, or set on_fault=retry",
        )


@rule("T12", "error")
def tool_file_is_well_formed(s: Situation) -> Iterator[Finding]:
    """The file that lists the tools can be read, and its entries make sense."""
    multi_turn = s.config.actor_rollout_ref.rollout.multi_turn
    path = multi_turn.tool_config_path
    if not multi_turn.enable or path is None or not exists(path):
        return
    for problem in tool_file_problems(path):
        yield Finding(
            field=f"{_TURNS}.tool_config_path",
            why=f"{problem.origin}: {problem.field}: {problem.why}",
            fix=problem.fix,
        )


@rule("T13", "error")
def interaction_file_is_well_formed(s: Situation) -> Iterator[Finding]:
    """The file that lists the users can be read, and its entries make sense."""
    multi_turn = s.config.actor_rollout_ref.rollout.multi_turn
    path = multi_turn.interaction_config_path
    if not multi_turn.enable or path is None or not exists(path):
        return
    try:
        read_interactions(path)
    except UserError as error:
        at = "" if error.field == FIELD else f"{error.field}: "
        yield Finding(field=FIELD, why=f"{at}{error.why}", fix=error.fix)
