"""Whether a run executes programs that its policy writes."""

from luyen.config.reward_parts import nodes, read_components, read_routes
from luyen.config.schema.run import RunConfig
from luyen.config.tool_file import read_tool_file

_RULE = "code"
_TOOL = "python"


def runs_programs(config: RunConfig) -> bool:
    """Whether programs of the policy are run, by a reward or by a tool."""
    return judges_programs(config) or offers_programs(config)


def judges_programs(config: RunConfig) -> bool:
    """Whether a component of the reward, or a route, is the rule that runs programs."""
    components = read_components(config.reward)[0]
    named = {one.rule for _, one in nodes(components)}
    routed = {name for names in read_routes(config.reward).values() for name in names}
    return _RULE in named | routed


def offers_programs(config: RunConfig) -> bool:
    """Whether the policy may call the tool that runs programs."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    path = multi_turn.tool_config_path
    if not multi_turn.enable or path is None:
        return False
    return any(one.kind == "builtin" and one.target == _TOOL for one in read_tool_file(path)[0])
