"""W: rules and judges meet rows and answers that they can judge, as far as those are known."""

from collections.abc import Iterator

from luyen.config.reward_parts import nodes, read_components
from luyen.config.rules.rule import Finding, Situation, rule
from luyen.config.schema.judge import ENGINE
from luyen.config.schema.reward import Component

_COMPONENTS = "reward.components"
_CARRIED = {
    "choice": "a letter as ground truth",
    "ifeval": "instructions",
    "json_schema": "a schema",
    "reasoning_gym": "an entry of reasoning_gym",
}
"""Rule -> what it reads of a row, which rows of `arithmetic://` and `tools://` do not have."""
_PLAIN = ("arithmetic", "tools")


@rule("W17", "error")
def lengths_lie_within_a_response(s: Situation) -> Iterator[Finding]:
    """What a rule of lengths leaves free, or penalises, is part of the longest response."""
    for path, node in nodes(read_components(s.config.reward)[0]):
        own = node.kwargs.get("max_response_length")
        most = own if isinstance(own, int) else s.config.data.max_response_length
        free, buffer = node.kwargs.get("free"), node.kwargs.get("buffer")
        why = None
        if node.rule == "length" and isinstance(free, int) and free >= most:
            why = f"free = {free} leaves nothing to penalise below {most} tokens"
        if node.rule == "overlong" and isinstance(buffer, int) and buffer > most:
            why = f"a buffer of {buffer} tokens does not fit into {most}"
        if why is not None:
            fix = "lower it, or raise data.max_response_length"
            yield Finding(field=_COMPONENTS, why=f"`{path}`: {why}", fix=fix)


@rule("W18", "error")
def rows_have_what_rules_read(s: Situation) -> Iterator[Finding]:
    """Rows of a built-in task carry what the rules of the components read of a row."""
    files = s.config.data.train_files
    if not files or any(path.partition("://")[0] not in _PLAIN for path in files):
        return
    for path, node in nodes(read_components(s.config.reward)[0]):
        if node.rule in _CARRIED and not _brings_its_own(node):
            why = f"`{path}`: the rule `{node.rule}` reads {_CARRIED[node.rule]} of a row, and "
            why += f"those of {files[0]} have none"
            yield Finding(field=_COMPONENTS, why=why, fix="choose a rule such as exact or numeric")


def _brings_its_own(node: Component) -> bool:
    has_digits = any(letter.isdigit() for letter in str(node.kwargs.get("choices", "")))
    return bool(node.kwargs.get("schema")) or has_digits


@rule("W19", "error")
def engine_holds_a_judgement(s: Situation) -> Iterator[Finding]:
    """The run's own engine has room for a question and the reply of a judge."""
    longest = s.batch.longest_sequence
    for path, node in nodes(read_components(s.config.reward)[0]):
        judge = node.judge
        if judge is not None and judge.base_url == ENGINE and judge.max_tokens >= longest:
            why = f"`{path}`: a reply may have {judge.max_tokens} tokens, and the engine holds "
            why += f"{longest} with the question"
            fix = "lower judge.max_tokens, or raise data.max_prompt_length"
            yield Finding(field=_COMPONENTS, why=why, fix=fix)
