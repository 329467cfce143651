"""Compares incrementally built token ids with re-tokenising the whole conversation.

The policy may write what it likes: a call with other spacing, a number in two tokens. That is
counted, and it is never wrong. What stands around it, prompt and bridges, must be the template's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias, final

from luyen.base.errors import UserError
from luyen.base.records import Branch, Message, Rollout, Source
from luyen.data.render import WRITTEN, Renderer, forms
from luyen.data.template_text import keeps_content

Mode: TypeAlias = Literal["strict", "ignore_strippable", "off"]
_Difference: TypeAlias = tuple[str, str, str]
"""Where it is, what grew there, what the template writes."""
_FIELD = "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RetokenizationResult:
    """How incrementally built token ids differ from re-tokenizing the whole conversation.

    Example:
        >>> found = RetokenizationResult(same_tokens=False, same_text=False, drift="' ' for ''",
        ...                    is_blank=True, sampled_differs=0, retokenised=0)
        >>> violation(found, "strict"), violation(found, "ignore_strippable")
        ("' ' for ''", None)
    """

    same_tokens: bool
    """Whether the whole, encoded at once, gives these tokens."""
    same_text: bool
    """Whether it reads the same."""
    drift: str | None
    """What differs outside of what the policy sampled; None: nothing."""
    is_blank: bool = False
    """Whether the drift is one of white space only."""
    sampled_differs: int = 0
    """Turns that the template would write in other words than the policy did."""
    retokenised: int = 0
    """Turns whose tokens are not those that their text would get."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """A run of sampled tokens and what follows it up to the next.

    Example:
        >>> _Turn(number=0, tokens=(7, 2), content="4", following=(9,)).content
        '4'
    """

    number: int
    """Which one it is."""
    tokens: Sequence[int]
    """What was sampled."""
    content: str
    """The same as text, the end of turn left off."""
    following: Sequence[int]
    """What stands between it and the next turn."""


def check_against_render(
    renderer: Renderer,
    *,
    branch: Branch | Rollout,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    mode: Mode,
) -> dict[str, float]:
    """Counters of a comparison; a violation of the mode stops the run with what differs."""
    if mode == "off":
        return {}
    found = compare(
        renderer,
        tokens=branch.tokens,
        sources=branch.sources,
        turns=branch.turns,
        messages=messages,
        tools=tools,
    )
    why = violation(found, mode)
    if why is not None:
        fix = "correct the chat template, or set ignore_strippable or off"
        what = "incrementally built token ids differ from re-tokenizing the whole conversation"
        raise UserError(_FIELD, mode, f"{what}: {why}", fix)
    return {
        "drift": float(found.drift is not None),
        "sampled_differs": float(found.sampled_differs),
        "retokenised": float(found.retokenised),
    }


def violation(found: RetokenizationResult, mode: Mode) -> str | None:
    """The reason to stop the rollout, or None."""
    if mode == "off" or (mode == "ignore_strippable" and found.is_blank):
        return None
    return found.drift


def compare(
    renderer: Renderer,
    *,
    tokens: Sequence[int],
    sources: Sequence[Source],
    turns: Sequence[int],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
) -> RetokenizationResult:
    """Compare the tokens of a branch, the last one, with a rendering of all messages.

    `messages` are the conversation from its beginning; the policy's own are the last ones of the
    assistant, one for each turn up to the last that has tokens.
    """
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    start, said = _split(renderer, tokens, sources, turns)
    if spoken[-1:] == [len(messages) - 1] and (not said or said[-1].number != turns[-1]):
        spoken.pop()  # it was aborted before its first token
        messages = messages[:-1]
    count = turns[-1] + int(bool(messages[-1]["role"] == "assistant"))
    places = [spoken[turn.number - count] for turn in said]
    try:
        form, ids = _accepted(renderer, messages, dict(zip(places, said, strict=True)), tools)
    except UserError as refused:
        return RetokenizationResult(same_tokens=False, same_text=False, drift=refused.why)
    if form[-1]["role"] == "assistant":
        ids = _without_trailing(renderer, ids, tokens[-1] in renderer.tokenizer.stop_ids)
    if ids == list(tokens):
        return RetokenizationResult(same_tokens=True, same_text=True, drift=None)
    opening = _read(renderer, tokens[:start])
    drift, differing = _differences(renderer, form, tools, places, ids, opening, said)
    encode = renderer.tokenizer.encode
    return RetokenizationResult(
        same_tokens=False,
        same_text=drift is None and not differing,
        drift=None if drift is None else _description(*drift),
        is_blank=drift is not None and _is_blank(*drift[1:]),
        sampled_differs=differing,
        retokenised=sum(encode(_read(renderer, t.tokens)) != list(t.tokens) for t in said),
    )


def _split(
    renderer: Renderer, tokens: Sequence[int], sources: Sequence[Source], turns: Sequence[int]
) -> tuple[int, list[_Turn]]:
    """Where the first sampled token stands, and the turns with what follows each."""
    sampled = [i for i, source in enumerate(sources) if source == Source.SAMPLED]
    starts = [i for i in sampled if i == 0 or turns[i - 1] != turns[i] or sources[i - 1] != 1]
    borders = [*starts, len(tokens)]
    stops = renderer.tokenizer.stop_ids
    found: list[_Turn] = []
    for start, beyond in pairwise(borders):
        end = 1 + max(i for i in sampled if i < beyond)
        turn_tokens = tokens[start:end]
        content = turn_tokens[:-1] if turn_tokens[-1] in stops else turn_tokens
        found.append(
            _Turn(
                number=turns[start],
                tokens=turn_tokens,
                content=_read(renderer, content),
                following=tokens[end:beyond],
            )
        )
    return borders[0], found


def _accepted(
    renderer: Renderer,
    messages: Sequence[Message],
    said: Mapping[int, _Turn],
    tools: Sequence[Mapping[str, Any]],
) -> tuple[list[Message], list[int]]:
    """The conversation in the first form that the template takes, and its tokens.

    Turns of this branch as they were sampled, the rest in parts: so a new branch begins.
    """

    def rendered(form: list[Message]) -> tuple[list[Message], list[int]]:
        is_prompt = form[-1]["role"] != "assistant"
        return form, renderer.tokens_of(form, tools, is_prompt=is_prompt)

    in_parts = forms(messages)[-1]
    sampled: list[Message] = [
        {"role": "assistant", "content": said[i].content} if i in said else message
        for i, message in enumerate(in_parts)
    ]
    for form in (sampled, in_parts):
        try:
            return rendered(form)
        except UserError:
            continue
    written: list[Message] = [
        {**message, WRITTEN: said[i].content} if i in said else message
        for i, message in enumerate(messages)
    ]
    return rendered(forms(written)[0])


def _without_trailing(renderer: Renderer, ids: list[int], has_ended: bool) -> list[int]:
    """Token ids of the whole conversation, without the template text after the last answer."""
    end = renderer.tokenizer.turn_end
    assert end is not None, "a template that renders has an end of turn"
    rest = renderer.tokenizer.encode(end.trailing if has_ended else end.text + end.trailing)
    return ids[: len(ids) - len(rest)] if ids[len(ids) - len(rest) :] == rest else ids


def _differences(
    renderer: Renderer,
    form: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    places: Sequence[int],
    ids: Sequence[int],
    opening: str,
    said: Sequence[_Turn],
) -> tuple[_Difference | None, int]:
    """The first difference outside of sampled text, and the number of turns that differ inside.

    All texts are read from tokens, so that what a tokenizer loses is lost on both sides.
    """
    text = _read(renderer, ids)
    if not said:
        return (None if text == opening else ("the prompt", opening, text)), 0
    starts = [_read(renderer, renderer.prompt_tokens(form[:i], tools)) for i in places]
    if starts[0] != opening:
        return ("the prompt", opening, starts[0]), 0
    for turn, start in zip(said, starts, strict=True):
        if not text.startswith(start):
            return (f"what leads to turn {turn.number}", start, text[: len(start)]), 0
    borders = [*map(len, starts), len(text)]
    differing = 0
    for turn, place, (start, end) in zip(said, places, pairwise(borders), strict=True):
        region, wording = text[start:end], _read(renderer, turn.tokens)
        after = _read(renderer, turn.following)
        if not region.endswith(after):
            rest = region.removeprefix(wording)
            rendered = rest if rest != region else region[-len(after) :]
            return (f"what follows turn {turn.number}", after, rendered), differing
        wrote = region[: len(region) - len(after)]
        if after and _is_lost(form[place], turn, wrote):
            return (f"turn {turn.number}", wording, wrote), differing
        differing += wrote != wording
    return None, differing


def _is_lost(message: Message, turn: _Turn, wrote: str) -> bool:
    """Whether a template that got a turn as it was sampled goes on without all of it.

    A branch should have begun there. What it makes of a turn's parts is not judged.
    """
    is_raw = "tool_calls" not in message and message["content"] == turn.content
    return is_raw and not keeps_content(wrote, message)


def _read(renderer: Renderer, tokens: Sequence[int]) -> str:
    return renderer.tokenizer.decode(tokens, skip_special=False)


def _description(where: str, grown: str, rendered: str) -> str:
    place = next(
        (i for i, (a, b) in enumerate(zip(grown, rendered, strict=False)) if a != b),
        min(len(grown), len(rendered)),
    )
    around = slice(max(0, place - 10), place + 20)
    return f"{where} has {grown[around]!r} and the template writes {rendered[around]!r}"


def _is_blank(grown: str, rendered: str) -> bool:
    return "".join(grown.split()) == "".join(rendered.split())
