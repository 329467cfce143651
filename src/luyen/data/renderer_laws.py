"""Renderer laws: what must hold of a tokenizer and its chat template before training with it.

Tests and the self-test call them on the same footing. A law answers with its violations, so that a
report can show all of them; none means that it holds for these conversations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from luyen.base.records import Message, Source
from luyen.data.render import Rendered, Renderer
from luyen.data.template_text import called_names

Tools: TypeAlias = Sequence[Mapping[str, Any]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One way in which a law fails.

    Example:
        >>> str(Violation(law="round trip", detail="branch 0 reads differently"))
        'round trip: branch 0 reads differently'
    """

    law: str
    """Name of the law."""
    detail: str
    """What was found."""

    def __str__(self) -> str:
        return f"{self.law}: {self.detail}"


def round_trip(
    renderer: Renderer, messages: Sequence[Message], tools: Tools = ()
) -> list[Violation]:
    """Tokens read back as the very text that the template wrote: nothing added, nothing lost."""
    found: list[Violation] = []
    last = renderer.conversation(messages, tools)[-1]
    written = renderer.text(messages, tools)
    read = renderer.tokenizer.decode(last.tokens, skip_special=False)
    if read != written:
        found.append(_violation(round_trip, f"{_difference(written, read)}"))
    prompt = renderer.text(messages, tools, is_prompt=True)
    read = renderer.tokenizer.decode(renderer.prompt_tokens(messages, tools), skip_special=False)
    if read != prompt:
        found.append(_violation(round_trip, f"as a prompt, {_difference(prompt, read)}"))
    return found


def prefix_extension(
    renderer: Renderer, messages: Sequence[Message], tools: Tools = ()
) -> list[Violation]:
    """A conversation laid down turn by turn, as a rollout is, equals the conversation as a whole.

    A template that rewrites what was said breaks this law; the renderer then begins a new branch.
    """
    branches = renderer.conversation(messages, tools)
    found = [_violation(prefix_extension, b) for branch in branches for b in branch.breaks]
    if found:
        return found
    whole = list(branches[0].tokens)
    written = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    tokens: list[int] = []
    for turn, i in enumerate(written):
        before = written[turn - 1] + 1
        if turn == 0:
            tokens += renderer.prompt_tokens(messages[:i], tools)
        else:
            grown = renderer.extend(tokens, messages[:before], messages[before:i], tools)
            tokens += grown.tokens
        tokens += _said(branches, turn)
        if tokens != whole[: len(tokens)]:
            return [_violation(prefix_extension, f"turn {turn} has other tokens when it grows")]
    return found


def mask_alignment(
    renderer: Renderer, messages: Sequence[Message], tools: Tools = ()
) -> list[Violation]:
    """What counts as sampled is what the assistant said, closed by its end of turn, once each."""
    branches = renderer.conversation(messages, tools)
    found: list[str] = []
    written = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for turn, i in enumerate(written):
        owners = [branch for branch in branches if _said([branch], turn)]
        if len(owners) != 1:
            found.append(f"turn {turn} is counted in {len(owners)} branches")
            continue
        text = renderer.tokenizer.decode(_said(owners, turn), skip_special=False)
        spoken = str(messages[i]["content"]).strip()
        if any(part not in text for part in (spoken, *called_names(messages[i]))):
            found.append(f"turn {turn} says {spoken!r} and counts {text!r}")
        elif text != (exact := _written(renderer, messages[: i + 1], tools, text)):
            found.append(f"turn {turn} is {exact!r} and counts {text!r}")
    return [_violation(mask_alignment, detail) for detail in found]


LAWS: tuple[Callable[..., list[Violation]], ...] = (round_trip, prefix_extension, mask_alignment)


def broken_laws(
    renderer: Renderer, messages: Sequence[Message], tools: Tools = ()
) -> list[Violation]:
    """Violations of every law for one conversation.

    Example:
        >>> from luyen.data.tokenizer import load_tokenizer
        >>> renderer = Renderer(load_tokenizer("builtin://arithmetic"))
        >>> broken_laws(renderer, PROBES["two turns"])
        []
    """
    return [violation for law in LAWS for violation in law(renderer, messages, tools)]


PROBES: dict[str, tuple[Message, ...]] = {
    "one turn": (
        {"role": "user", "content": "What is 12+34?"},
        {"role": "assistant", "content": "It is 46."},
    ),
    "two turns": (
        {"role": "user", "content": "What is 12+34?"},
        {"role": "assistant", "content": "It is 46."},
        {"role": "user", "content": "And 1+2?"},
        {"role": "assistant", "content": "Three."},
    ),
    "with a system message": (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 12+34?"},
        {"role": "assistant", "content": "46"},
    ),
    "with thinking": (
        {"role": "user", "content": "What is 12+34?"},
        {"role": "assistant", "content": "<think>\nCarry nothing.\n</think>\n\n46"},
        {"role": "user", "content": "And 1+2?"},
        {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n3"},
    ),
}
"""Conversations that the self-test renders with an unknown tokenizer."""


def _said(branches: Sequence[Rendered], turn: int) -> list[int]:
    return [
        token
        for branch in branches
        for token, source, at in zip(branch.tokens, branch.sources, branch.turns, strict=True)
        if source == Source.SAMPLED and at == turn
    ]


def _written(renderer: Renderer, messages: Sequence[Message], tools: Tools, otherwise: str) -> str:
    """What the template writes between the generation prompt and the turn's end, end included.

    A template that does not keep its generation prompt gives nothing to compare with.
    """
    prompt = renderer.text(messages[:-1], tools, is_prompt=True)
    whole = renderer.text(messages, tools)
    end = renderer.tokenizer.turn_end
    if end is None or not whole.startswith(prompt):
        return otherwise
    return whole.removeprefix(prompt).removesuffix(end.trailing)


def _violation(law: Callable[..., list[Violation]], detail: str) -> Violation:
    return Violation(law=law.__name__.replace("_", " "), detail=detail)


def _difference(written: str, read: str) -> str:
    pairs = enumerate(zip(written, read, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(written), len(read)))
    around = slice(max(0, place - 10), place + 10)
    return f"{written[around]!r} reads back as {read[around]!r}"
