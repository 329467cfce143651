"""What `check` knows about the rules that judge answers, without importing them.

The rewards package registers functions under these names; a test holds the two equal, knobs
included.
"""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RuleFacts:
    """What a rule takes and needs.

    Example:
        >>> RULE_REWARDS["math"].package
        'math_verify'
    """

    knobs: tuple[str, ...] | None = ()
    """Names it may be given under `kwargs`; None when a plugin does not say."""
    required: tuple[str, ...] = ()
    """Those without a default."""
    package: str | None = None
    """Python package that must be installed."""
    extra: str | None = None
    """Extra of this package that brings it."""


RULE_REWARDS: dict[str, RuleFacts] = {
    "exact": RuleFacts(knobs=("strip", "ignore_case")),
    "numeric": RuleFacts(knobs=("tolerance",)),
    "gsm8k": RuleFacts(knobs=("method", "format_score")),
    "math": RuleFacts(knobs=("float_rounding",), package="math_verify", extra="math"),
    "choice": RuleFacts(knobs=("choices",)),
    "regex": RuleFacts(knobs=("pattern", "match"), required=("pattern",)),
    "json": RuleFacts(knobs=("required", "fenced")),
    "json_schema": RuleFacts(knobs=("schema", "fenced")),
    "ifeval": RuleFacts(knobs=("mode", "credit")),
    "reasoning_gym": RuleFacts(knobs=("tag",), package="reasoning_gym", extra="tasks"),
    "code": RuleFacts(knobs=("credit", "cpu_s", "memory_mb", "refuse_forgeable")),
    "length": RuleFacts(knobs=("free", "max_response_length")),
    "overlong": RuleFacts(
        knobs=("buffer", "penalty_factor", "max_response_length"), required=("buffer",)
    ),
    "cosine": RuleFacts(knobs=("at_zero", "at_limit", "when_cut", "max_response_length")),
    "repetition": RuleFacts(knobs=("ngram", "unit")),
    "tool_valid": RuleFacts(knobs=("without",)),
    "tool_success": RuleFacts(knobs=("without",)),
    "tool_needless": RuleFacts(knobs=("allowed",)),
    "tool_cost": RuleFacts(knobs=("per_call", "per_second", "per_character", "prices")),
    "tool_safety": RuleFacts(
        knobs=("forbidden_tools", "forbidden_arguments", "secrets", "longest_query", "canaries")
    ),
    "given": RuleFacts(knobs=("without",)),
}
