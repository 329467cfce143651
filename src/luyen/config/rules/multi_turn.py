"""T, Z: multi-turn conversations, tools, environments, and the sandbox for policy code."""

from collections.abc import Iterator

from luyen.base.errors import UserError, did_you_mean
from luyen.base.input_files import exists
from luyen.config.environments import (
    FIELD,
    PACKAGES,
    argument_faults,
    read_environments,
    read_interactions,
)
from luyen.config.rules.rule import Finding, RuleContext, rule
from luyen.config.tool_file import reward_runs_code, runs_policy_code, tool_file_problems

_TURNS = "actor_rollout_ref.rollout.multi_turn"
_ROOM_FOR_TOOLS = 1024


@rule("T01", "error")
def tools_need_messages(s: RuleContext) -> Iterator[Finding]:
    """Tool-calling keeps conversations as messages."""
    multi_turn = s.config.actor_rollout_ref.rollout.multi_turn
    if multi_turn.enable and not s.config.data.return_raw_chat:
        yield Finding(
            field="data.return_raw_chat",
            why="multi-turn rollouts extend the conversation; as plain text its structure is lost",
            fix="set it to true",
        )


@rule("T02", "error")
def truncation_spares_tool_schemas(s: RuleContext) -> Iterator[Finding]:
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
def prompt_has_room_for_tools(s: RuleContext) -> Iterator[Finding]:
    """Prompts with tool schemas get room for them."""
    data, multi_turn = s.config.data, s.config.actor_rollout_ref.rollout.multi_turn
    has_tools = multi_turn.tool_config_path or multi_turn.function_tool_path
    if multi_turn.enable and has_tools and data.max_prompt_length < _ROOM_FOR_TOOLS:
        yield Finding(
            field="data.max_prompt_length",
            why=f"tool schemas are part of the prompt and often take several hundred tokens; "
            f"prompts above {data.max_prompt_length} are dropped or refused",
            fix=f"set it to {_ROOM_FOR_TOOLS} or more, or look at the filter's count",
        )


@rule("T04", "warning")
def turns_have_tools_or_users(s: RuleContext) -> Iterator[Finding]:
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
def turn_files_exist(s: RuleContext) -> Iterator[Finding]:
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
def multi_turn_key_has_effect(s: RuleContext) -> Iterator[Finding]:
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
def turns_share_the_response(s: RuleContext) -> Iterator[Finding]:
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
def call_format_is_known(s: RuleContext) -> Iterator[Finding]:
    """`multi_turn.format` is a way to write calls that exists."""
    multi_turn = s.config.actor_rollout_ref.rollout.multi_turn
    if multi_turn.format not in s.known.tool_formats:
        fix = did_you_mean(multi_turn.format, s.known.tool_formats)
        yield Finding(field=f"{_TURNS}.format", why="no such format of tool calls", fix=fix)


@rule("T09", "error")
def environments_are_well_formed(s: RuleContext) -> Iterator[Finding]:
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
        for why, fix in argument_faults(choice) if multi_turn.enable else ():
            yield Finding(field=field, why=f"`{name}`: {why}", fix=fix)
        package, extra = PACKAGES.get(choice.kind, (None, None))
        if multi_turn.enable and package is not None and not s.installed(package):
            why = f"`{name}`: `{choice.kind}` needs the package {package}, not installed here"
            yield Finding(field=field, why=why, fix=f"pip install 'luyen[{extra}]'")
    if multi_turn.environment is not None and multi_turn.environment not in found:
        fix = did_you_mean(multi_turn.environment, found)
        yield Finding(field=f"{_TURNS}.environment", why="no environment of this name", fix=fix)


@rule("T10", "error")
def groups_can_keep_their_minimum(s: RuleContext) -> Iterator[Finding]:
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
def retries_have_effect(s: RuleContext) -> Iterator[Finding]:
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
def tool_file_is_well_formed(s: RuleContext) -> Iterator[Finding]:
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
def interaction_file_is_well_formed(s: RuleContext) -> Iterator[Finding]:
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


# Z: code that a policy writes runs only with the isolation that the run requires.

_REQUIRE = "sandbox.require"


@rule("Z01", "error")
def required_isolation_is_available(s: RuleContext) -> Iterator[Finding]:
    """Every promise under `sandbox.require` is kept on this machine."""
    if runs_policy_code(s.config):
        lost = [one for one in s.missing_promises() if one in s.config.sandbox.require]
        if lost:
            why = f"nothing on this machine keeps {', '.join(lost)} of programs out of reach"
            fix = "see `luyen selftest --sandbox`; run where the sandbox is available, or drop it"
            yield Finding(field=_REQUIRE, why=why, fix=fix)


@rule("Z02", "warning")
def missing_isolation_is_reported(s: RuleContext) -> Iterator[Finding]:
    """Code of a policy runs although a promise is not kept here."""
    if runs_policy_code(s.config):
        lost = [one for one in s.missing_promises() if one not in s.config.sandbox.require]
        if lost:
            why = f"programs of the policy run, and nothing here keeps this safe: {', '.join(lost)}"
            fix = f"see `luyen selftest --sandbox`; {_REQUIRE}=[{','.join(lost)}] refuses the run"
            yield Finding(field=_REQUIRE, why=why, fix=fix)


@rule("Z03", "note")
def forgeable_verdicts_are_reported(s: RuleContext) -> Iterator[Finding]:
    """Some assertions are evaluated in the program's interpreter, which can make them pass."""
    if reward_runs_code(s.config) and "verdicts" not in s.config.sandbox.require:
        why = (
            "assertions other than `assert CALL == LITERAL` and its like are evaluated in the "
            "program's process, which can forge the verdict; reward/.../forgeable counts them"
        )
        yield Finding(field=_REQUIRE, why=why, fix=f"{_REQUIRE}=[verdicts] refuses such rows")


@rule("Z04", "warning")
def sandbox_demands_have_effect(s: RuleContext) -> Iterator[Finding]:
    """`sandbox.require` is set where code of the policy is run."""
    config = s.config
    if config.sandbox.require and not runs_policy_code(config) and not config.trainer.plugins:
        why = "neither the rule `code` nor the tool `python` is used, so no program is run"
        yield Finding(field=_REQUIRE, why=why, fix="drop it")
    elif "verdicts" in config.sandbox.require and not reward_runs_code(config):
        why = "the rule `code` is not used, so there are no verdicts on programs"
        yield Finding(field=_REQUIRE, why=why, fix="drop `verdicts`")
