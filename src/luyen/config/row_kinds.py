"""Which rows an address gives, and which of them a stage can learn from."""

from luyen.config.arithmetic_task import read_arithmetic
from luyen.config.schema.run import RunConfig
from luyen.config.signals import PreferenceLosses
from luyen.config.task_sources import read_tool_task
from luyen.config.task_url import parse_task_url

_TAUGHT = {
    None: "prompts",
    "traces": "conversation",
    "pairs": "preference",
    "labels": "labelled",
    "steps": "stepped",
}
_OBJECTIVES = {"bradley_terry": "preference", "regression": "labelled", "process": "stepped"}
QUERIES = {
    "prompts": "no `traces`, `pairs`, `labels` or `steps`",
    "conversation": "`traces=1`",
    "preference": "`pairs=even`",
    "labelled": "`labels=even`",
    "stepped": "`steps=1`",
}
"""Kind of rows -> what makes `arithmetic://sum` give them."""


def kind_of_task(address: str) -> str | None:
    """The kind of the rows of an address that makes sense; None where only its rows show it.

    Example:
        >>> kind_of_task("arithmetic://sum?pairs=even"), kind_of_task("hf://org/rows")
        ('preference', None)
    """
    url = parse_task_url(address)
    match url.scheme:
        case "arithmetic":
            return _TAUGHT[read_arithmetic(url).taught]
        case "tools":
            return "conversation" if read_tool_task(url).traces else "prompts"
        case "reasoning_gym":
            return "prompts"
        case _:
            return None


def kinds_learned(config: RunConfig, losses: PreferenceLosses) -> tuple[str, ...]:
    """Kinds of addresses that the stage of a run finds something to learn in.

    Example:
        >>> kinds_learned(RunConfig(), {})
        ('prompts',)
    """
    match config.trainer.stage:
        case "rl":
            return ("prompts",)
        case "sft" | "distill":
            return ("conversation",)
        case "reward_model":
            return (_OBJECTIVES[config.reward_training.objective],)
        case "preference":
            facts = losses.get(next(iter(config.preference.loss_type), ""))
            is_paired = facts is None or facts.kind == "pair"
            return ("preference",) if is_paired else ("labelled", "preference")
