"""Messages to tokens through the tokenizer's chat template, with the origin of every token.

A conversation is laid down piece by piece, as it happens: the prompt, what the assistant says, the
bridge to its next turn. Each piece is tokenised once and never again, so training sees exactly the
tokens that inference sees, and the origin of a token is the piece it came with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from luyen.base.records import Message, Source
from luyen.data.tokenizer import Tokenizer, TurnEnd

Tools = Sequence[Mapping[str, Any]]
REWRITES = "the template rewrites what was said before"
PROMPT_NOT_KEPT = "the template renders an answer without its own generation prompt"
CALL_LEFT_OUT = "the template does not write the tool call"
DROPPED = "messages after the last answer are left out"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A conversation, or a branch of one, as tokens.

    Example:
        >>> Rendered(tokens=(5, 6), sources=(Source.PROMPT, Source.SAMPLED), turns=(0, 0)).sampled
        (6,)
    """

    tokens: tuple[int, ...]
    """Ids, in order."""
    sources: tuple[Source, ...]
    """Where each came from."""
    turns: tuple[int, ...]
    """Assistant turn that each belongs to; what leads to a turn belongs to it."""
    breaks: tuple[str, ...] = ()
    """What kept the branch from being one growing token list, if anything did."""

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.sources) == len(self.turns), "streams differ in length"

    @property
    def sampled(self) -> tuple[int, ...]:
        """The tokens that the assistant wrote."""
        pairs = zip(self.tokens, self.sources, strict=True)
        return tuple(token for token, source in pairs if source == Source.SAMPLED)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """What follows the tokens that are there, up to the assistant's next turn.

    Example:
        >>> Extension(tokens=(7,), sources=(Source.TOOL,), restart=None).restart is None
        True
    """

    tokens: tuple[int, ...]
    """Tokens to append; after a restart the whole prompt of the new branch."""
    sources: tuple[Source, ...]
    """Where each came from."""
    restart: str | None
    """Why the conversation cannot simply grow and a new branch must begin; None when it can."""


@final
class Renderer:
    """The chat template of one tokenizer, applied the same way in training and in inference.

    Example:
        >>> from luyen.data.tokenizer import load_tokenizer
        >>> renderer = Renderer(load_tokenizer("builtin://arithmetic"))
        >>> renderer.text_of(renderer.prompt_tokens([{"role": "user", "content": "1+2="}]))
        'user\\n1+2=\\nassistant\\n'
    """

    def __init__(
        self, tokenizer: Tokenizer, *, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """`template_kwargs` reach the template at every call, e.g. `enable_thinking`."""
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})

    def text(
        self, messages: Sequence[Message], tools: Tools = (), *, is_prompt: bool = False
    ) -> str:
        """The conversation as text; a prompt ends where the assistant begins to speak."""
        return self.tokenizer.apply_template(
            messages,
            tools=tools,
            add_generation_prompt=is_prompt,
            template_kwargs=self.template_kwargs,
        )

    def prompt_tokens(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Tokens after which the assistant speaks."""
        return self.tokenizer.encode(self.text(messages, tools, is_prompt=True))

    def text_of(self, tokens: Sequence[int]) -> str:
        """What a reward reads: the tokens as text, special tokens left out."""
        return self.tokenizer.decode(tokens)

    def extend(
        self,
        tokens: Sequence[int],
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Tools = (),
    ) -> Extension:
        """What to append to `tokens`, which say `messages`, so that the assistant speaks next.

        The tokens that are there are neither decoded nor compared; only whether the last one
        already ends the turn is looked at. A turn that was cut off is closed by the template.
        """
        before = self.text(messages, tools)
        after = self.text([*messages, *new_messages], tools, is_prompt=True)
        has_ended = bool(tokens) and tokens[-1] in self.tokenizer.stop_ids
        bridge = _bridge(before, after, self._turn_end(), has_ended=has_ended)
        if bridge is None:
            ids = self.tokenizer.encode(after)
            sources = (Source.PROMPT,) * len(ids)
            return Extension(tokens=tuple(ids), sources=sources, restart=REWRITES)
        ids, sources = self._labelled(bridge, new_messages)
        return Extension(tokens=tuple(ids), sources=tuple(sources), restart=None)

    def conversation(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[Rendered, ...]:
        """The whole conversation with provenance: one entry, unless the template rewrites history.

        Where it does, a new branch begins with the rewritten past as its prompt, so that every
        assistant turn is sampled in exactly one branch, after the tokens that inference would see.
        """
        written = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        stream, branches, said_at, before = _Stream(), list[Rendered](), 0, ""
        for turn, i in enumerate(written):
            opening, said, is_kept = self._turn(messages[: i + 1], tools)
            bridge = _bridge(before, opening, self._turn_end(), has_ended=True) if turn else None
            if bridge is None:
                if turn:
                    branches.append(stream.close())
                    stream = _Stream(f"turn {turn}: {REWRITES}")
                stream.add(self.tokenizer.encode(opening), Source.PROMPT, turn)
            else:
                stream.add_each(*self._labelled(bridge, messages[said_at:i]), turn)
            if not is_kept:
                stream.breaks.append(f"turn {turn}: {PROMPT_NOT_KEPT}")
            if any(name not in said for name in called_names(messages[i])):
                stream.breaks.append(f"turn {turn}: {CALL_LEFT_OUT}")
            stream.add(self.tokenizer.encode(said), Source.SAMPLED, turn)
            said_at, before = i + 1, self.text(messages[: i + 1], tools)
        if written:
            self._finish(stream, before, messages, said_at, tools, len(written) - 1)
        else:
            stream.add(self.tokenizer.encode(self.text(messages, tools)), Source.PROMPT, 0)
        return (*branches, stream.close())

    def _turn(self, messages: Sequence[Message], tools: Tools) -> tuple[str, str, bool]:
        """What stands before the last message, what the assistant writes, whether they fit."""
        prompt = self.text(messages[:-1], tools, is_prompt=True)
        whole = self.text(messages, tools)
        is_kept = whole.startswith(prompt)
        opening = prompt if is_kept else _common_start(prompt, whole)
        said = whole.removeprefix(opening).removesuffix(self._turn_end().trailing)
        return opening, said, is_kept

    def _finish(
        self,
        stream: "_Stream",
        before: str,
        messages: Sequence[Message],
        said_at: int,
        tools: Tools,
        turn: int,
    ) -> None:
        """Add what stands after the last answer; a template that rewrites for it is left be."""
        rest = _bridge(before, self.text(messages, tools), self._turn_end(), has_ended=True)
        if rest is None:
            stream.breaks.append(DROPPED)
        else:
            stream.add_each(*self._labelled(rest, messages[said_at:]), turn)

    def _turn_end(self) -> TurnEnd:
        end = self.tokenizer.turn_end
        assert end is not None, "a template that renders has an end of turn"
        return end

    def _labelled(self, text: str, messages: Sequence[Message]) -> tuple[list[int], list[Source]]:
        """Tokens of a bridge; what the messages say is told from what the template adds."""
        ids, spans = self.tokenizer.encode_spans(text)
        contents = _find_contents(text, messages)
        if spans is None or contents is None:
            has_tool = any(message["role"] == "tool" for message in messages)
            return ids, [Source.TOOL if has_tool else Source.TEMPLATE] * len(ids)
        sources = [Source.TEMPLATE] * len(ids)
        for start, end, source in contents:
            for k, (first, beyond) in enumerate(spans):
                if first < end and beyond > start:
                    sources[k] = source
        return ids, sources


def called_names(message: Message) -> list[str]:
    """Functions that a message calls."""
    return [call["function"]["name"] for call in message.get("tool_calls", ())]


@final
class _Stream:
    """A branch while it grows."""

    def __init__(self, *breaks: str) -> None:
        self.tokens: list[int] = []
        self.sources: list[Source] = []
        self.turns: list[int] = []
        self.breaks: list[str] = [*breaks]

    def add(self, ids: Sequence[int], source: Source, turn: int) -> None:
        self.add_each(ids, [source] * len(ids), turn)

    def add_each(self, ids: Sequence[int], sources: Sequence[Source], turn: int) -> None:
        self.tokens += ids
        self.sources += sources
        self.turns += [turn] * len(ids)

    def close(self) -> Rendered:
        return Rendered(
            tokens=tuple(self.tokens),
            sources=tuple(self.sources),
            turns=tuple(self.turns),
            breaks=tuple(self.breaks),
        )


def _bridge(before: str, after: str, end: TurnEnd, *, has_ended: bool) -> str | None:
    """Text from the end of a turn to the end of `after`; None when `after` changes the past.

    `before` ends as the template ends a turn. What was sampled ends with the turn's end token, or
    in the middle of nowhere: then the template's own ending goes first.
    """
    said = before.removesuffix(end.trailing)
    if not after.startswith(said):
        return None
    return ("" if has_ended else end.text) + after[len(said) :]


def _common_start(a: str, b: str) -> str:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    return a[: min(length, len(b))]


def _find_contents(text: str, messages: Sequence[Message]) -> list[tuple[int, int, Source]] | None:
    """Where each message's content stands in a bridge; None when the template transforms one."""
    found: list[tuple[int, int, Source]] = []
    position = 0
    for message in messages:
        content = str(message.get("content") or "").strip()
        start = text.find(content, position)
        if start < 0:
            return None
        position = start + len(content)
        source = Source.TOOL if message["role"] == "tool" else Source.PROMPT
        found.append((start, position, source))
    return found
