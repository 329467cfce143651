"""What a chat template does with short conversations: whether it heeds them, and how."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from luyen.config.chat_template.process import TemplateError, render

FIRST, SECOND = "Kp7", "Zq4"
"""Words that no template writes of its own accord."""
Messages = Sequence[Mapping[str, Any]]


def template_fault(source: str, special: Mapping[str, Any] | None = None) -> str | None:
    """Why a template cannot be used, in words; None where it can.

    `special` are the tokens that the tokenizer hands to it by name.
    """
    return _fault(source, tuple(sorted((special or {}).items())))


@lru_cache(maxsize=64)
def _fault(source: str, special: tuple[tuple[str, str], ...]) -> str | None:
    """Kept: one that never ends costs its whole time each time that it is tried."""
    try:
        texts = [_rendered(source, [_user(word)], dict(special)) for word in (FIRST, SECOND)]
    except TemplateError as error:
        # A template may refuse what it likes, but one question of a user is what rows are.
        return f"it does not render a question: {error}"
    if texts[0] == texts[1]:
        return "it ignores the messages: two different questions give the same text"
    return None


def template_remarks(source: str, special: Mapping[str, Any]) -> list[str]:
    """What a user should know of a template that can be used, a sentence each."""
    found: list[str] = []
    if template_fault(source, special) is not None:
        return found
    question = [_user(FIRST)]
    try:
        opened = _rendered(source, question, special)
        whole = _rendered(source, [*question, _said("assistant", SECOND)], special)
    except TemplateError:
        return found  # it does not write answers of the past, and says so when asked to
    header = whole.removeprefix(opened).partition(SECOND)[0]
    if whole.startswith(opened) and header.strip():
        found.append(
            f"the chat template has no generation prompt: the policy must write {header!r} itself"
        )
    try:
        system = _rendered(source, [_said("system", SECOND), *question], special)
    except TemplateError:
        return found  # it refuses them, which rows with one will say
    if SECOND not in system:
        found.append("the chat template leaves system messages out")
    return found


def _user(word: str) -> dict[str, str]:
    return _said("user", word)


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _rendered(source: str, messages: Messages, special: Mapping[str, Any] | None) -> str:
    return render(source, variables(messages, special=special or {}))


def variables(
    messages: Messages,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    special: Mapping[str, Any],
) -> dict[str, Any]:
    """What transformers hands to a template."""
    return {
        "messages": [dict(message) for message in messages],
        "tools": [dict(tool) for tool in tools] or None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **special,
    }
