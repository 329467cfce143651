"""Names that scores will have, as far as they can be known before anything is scored."""

from luyen.config.reward_catalog import RULE_REWARDS
from luyen.config.reward_parts import nodes, read_components, read_routes
from luyen.config.schema.run import RunConfig

_WHOLE = ("reward", "score")
_DIVIDED = ("code", "given", "tool_cost", "tool_safety", "tool_valid", "tool_success")
"""Rules whose score may have parts of its own."""
_BUILT_IN = {"arithmetic": "exact", "tools": "exact", "reasoning_gym": "reasoning_gym"}
"""Source of rows -> the rule that judges them where the configuration says nothing."""


def score_names(config: RunConfig) -> tuple[str, ...] | None:
    """Every name that a part of the reward has, and those of the whole; None: scoring shows.

    Example:
        >>> score_names(RunConfig()) is None
        True
    """
    reward = config.reward
    components, wrong = read_components(reward)
    is_plain = reward.reward_manager.name in ("naive", "dapo", "prime")
    if reward.custom_reward_function.path is not None or wrong or not is_plain:
        return None
    routed = [name for names in read_routes(reward).values() for name in names]
    if not components and not routed:
        routed = _judges_of(config)
    parts = dict(nodes(components))
    rules = [*(n for n in routed if n not in components)]
    rules += [node.rule for node in parts.values() if node.rule is not None]
    if not (parts or routed) or any(r not in RULE_REWARDS or r in _DIVIDED for r in rules):
        return None
    named = [path.rpartition("/")[2] for path in parts]
    penalty = ["overlong"] if reward.overlong_buffer.enable else []
    return tuple(dict.fromkeys([*_WHOLE, *named, *routed, *penalty]))


def _judges_of(config: RunConfig) -> list[str]:
    """The built-in rules of the rows; none where files hold some of them."""
    schemes = [path.partition("://")[0] for path in config.data.train_files]
    is_known = all(scheme in _BUILT_IN for scheme in schemes)
    return [_BUILT_IN[scheme] for scheme in schemes] if is_known else []
