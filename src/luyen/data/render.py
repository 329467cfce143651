"""Messages to tokens through the tokenizer's chat template, with the origin of every token.

A conversation is laid down piece by piece, as it happens: the prompt, what the assistant says, the
bridge to its next turn. Each piece is tokenised once and never again, so training sees exactly the
tokens that inference sees, and the origin of a token is the piece it came with.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

from luyen.base.errors import UserError
from luyen.base.records import Message, Source
from luyen.data.template_text import (
    ALTERED,
    Bridge,
    Marks,
    PlainText,
    called_names,
    common_start,
    end_as_said,
    end_as_written,
    find_contents,
    keeps_content,
    sources_of,
)
from luyen.data.tokenizer import Tokenizer, TurnEnd

# Rendered conversations: token ids with the source of each.


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
    notes: tuple[str, ...] = ()
    """What had to be changed in the messages' text, if anything had to be."""


@final
class BranchBuilder:
    """A branch while it grows."""

    def __init__(self, *breaks: str) -> None:
        self.tokens: list[int] = []
        self.sources: list[Source] = []
        self.turns: list[int] = []
        self.breaks: list[str] = [*breaks]

    def add(self, ids: Sequence[int], source: Source, turn: int) -> None:
        """Append tokens of one origin."""
        self.add_each(ids, [source] * len(ids), turn)

    def add_each(self, ids: Sequence[int], sources: Sequence[Source], turn: int) -> None:
        """Append tokens with the origin of each."""
        self.tokens += ids
        self.sources += sources
        self.turns += [turn] * len(ids)

    def close(self) -> Rendered:
        """The branch as it stands."""
        return Rendered(
            tokens=tuple(self.tokens),
            sources=tuple(self.sources),
            turns=tuple(self.turns),
            breaks=tuple(self.breaks),
        )


# Messages of a conversation in which tools are called, in a form that every chat template
# takes.
#
# What the policy sampled and what a template makes of the same call can differ in spacing, in
# the order of keys, in ids. A message therefore holds both: its parts, and the text as it was
# written.

WRITTEN = "written"
"""Key of the text as the policy wrote it, calls included, the end of turn left off.

No template sees the key: the renderer shows it one form or the other."""

_CHANNEL = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|end\|>|<\|start\|>|\Z)"
    r"(?:<\|end\|>)?",
    re.DOTALL,
)


def assistant_message(
    content: str,
    calls: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    turn: int,
    written: str | None = None,
) -> Message:
    """What the assistant said in a turn: text without the calls, and name and arguments of each.

    `written` is the whole turn as it was sampled; templates get it as plain content where they
    take it, so that what was said is not said in other words.

    Example:
        >>> message = assistant_message("", [("add", {"a": 1})], turn=0)
        >>> message["tool_calls"][0]["id"], message["tool_calls"][0]["function"]["name"]
        ('c00000000', 'add')
    """
    message: dict[str, Any] = {"role": "assistant", **_channels(content, bool(calls))}
    if calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": call_id(turn, i),
                "function": {"name": name, "arguments": dict(arguments)},
            }
            for i, (name, arguments) in enumerate(calls)
        ]
    if written is not None and written != message.get("content"):
        message[WRITTEN] = written
    return message


def tool_message(name: str, text: str, *, turn: int, index: int) -> Message:
    """What a tool answered to call number `index` of a turn.

    Example:
        >>> tool_message("add", "3", turn=1, index=0)["tool_call_id"]
        'c00010000'
    """
    return {"role": "tool", "name": name, "content": text, "tool_call_id": call_id(turn, index)}


def call_id(turn: int, index: int) -> str:
    """Nine letters and digits, the same in every run: some templates refuse anything else."""
    return f"c{turn % 10_000:04d}{index % 10_000:04d}"


def forms(messages: Sequence[Message]) -> list[list[Message]]:
    """The conversation with its turns as written, then with their parts; one where none differs."""
    in_parts: list[Message] = [
        {key: value for key, value in message.items() if key != WRITTEN} for message in messages
    ]
    as_written: list[Message] = [
        {"role": message["role"], "content": message[WRITTEN]} if WRITTEN in message else parts
        for message, parts in zip(messages, in_parts, strict=True)
    ]
    return [as_written, in_parts] if as_written != in_parts else [in_parts]


def _channels(content: str, has_calls: bool) -> dict[str, str]:
    """Text as it is; text in channels as `thinking` and `content`, which such templates demand.

    A message with calls may have only one of the two: then all of it is thinking.
    """
    found = _CHANNEL.findall(content)
    if not found:
        return {"content": content}
    thoughts = [text for channel, text in found if channel == "analysis" or has_calls]
    said = [text for channel, text in found if channel != "analysis" and not has_calls]
    thinking = {"thinking": "\n".join(thoughts)} if thoughts else {}
    return {"content": "\n".join(said), **thinking}


T = TypeVar("T")
Tools = Sequence[Mapping[str, Any]]
REWRITES = "the template rewrites what was said before"
PROMPT_NOT_KEPT = "the template renders an answer without its own generation prompt"
CALL_LEFT_OUT = "the template does not write the tool call"
DROPPED = "messages after the last answer are left out"


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
        self._plain = PlainText(tokenizer)

    def text(
        self, messages: Sequence[Message], tools: Tools = (), *, is_prompt: bool = False
    ) -> str:
        """The conversation as text; a prompt ends where the assistant begins to speak."""
        text, marks = self._marked(messages, tools, is_prompt=is_prompt)
        return marks.read(text)[0]

    def tokens_of(
        self, messages: Sequence[Message], tools: Tools = (), *, is_prompt: bool = False
    ) -> list[int]:
        """The conversation as tokens; what users and tools say is never read as structure."""
        text, marks = self._marked(messages, tools, is_prompt=is_prompt)
        return self._ids(text, marks)

    def prompt_tokens(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Tokens after which the assistant speaks."""
        return self.tokens_of(messages, tools, is_prompt=True)

    def least_tokens(
        self, messages: Sequence[Message], tools: Tools = (), *, is_prompt: bool = False
    ) -> int:
        """A number below which the tokens of a conversation are never: found without reading it."""
        return self.tokenizer.least_tokens(self.text(messages, tools, is_prompt=is_prompt))

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
        already ends the turn is looked at. A turn that was cut off is closed by the template. Where
        the policy ended its turn with the marker of the next speaker, it is not written again.
        """
        has_ended = bool(tokens) and tokens[-1] in self.tokenizer.stop_ids
        count = len(messages)

        def grown(form: Sequence[Message]) -> Extension:
            marks, safe = self._plain.protect(form)
            after = self._render(safe, tools, is_prompt=True)
            start, why = self._turn_ends(safe[:count], after, tools)
            if start is None:
                ids = self.prompt_tokens([*messages, *new_messages], tools)
                sources = (Source.PROMPT,) * len(ids)
                return Extension(tokens=tuple(ids), sources=sources, restart=why)
            lead = "" if has_ended else self._turn_end().text
            bridge = Bridge(
                marks=marks, messages=safe, count=count, whole=after, start=start, lead=lead
            )
            ids, sources, notes = self._labelled(bridge, tools, is_prompt=True)
            said = int(has_ended and self._is_next_speaker(tokens[-1]) and ids[:1] == [tokens[-1]])
            return Extension(
                tokens=tuple(ids[said:]), sources=tuple(sources[said:]), restart=None, notes=notes
            )

        return _first_accepted(forms([*messages, *new_messages]), grown)

    def conversation(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[Rendered, ...]:
        """The whole conversation with provenance: one entry, unless the template rewrites history.

        Where it does, a new branch begins with the rewritten past as its prompt, so that every
        assistant turn is sampled in exactly one branch, after the tokens that inference would see.
        """
        marks, safe = self._plain.protect(forms(messages)[-1])
        written = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        stream, branches, said_at, before = BranchBuilder(), list[Rendered](), 0, ""
        for turn, i in enumerate(written):
            opening, so_far, is_kept = self._turn(safe[: i + 1], tools)
            said = so_far.removeprefix(opening).removesuffix(self._turn_end().trailing)
            start = end_as_written(before, opening, self._turn_end()) if turn else None
            if start is None:
                if turn:
                    branches.append(stream.close())
                    stream = BranchBuilder(f"turn {turn}: {REWRITES}")
                stream.add(self._ids(opening, marks), Source.PROMPT, turn)
            else:
                bridge = Bridge(
                    marks=marks, messages=safe[:i], count=said_at, whole=opening, start=start
                )
                stream.add_each(*self._labelled(bridge, tools, is_prompt=True)[:2], turn)
            if not is_kept:
                stream.breaks.append(f"turn {turn}: {PROMPT_NOT_KEPT}")
            if any(name not in said for name in called_names(messages[i])):
                stream.breaks.append(f"turn {turn}: {CALL_LEFT_OUT}")
            stream.add(self._ids(said, marks), Source.SAMPLED, turn)
            said_at, before = i + 1, so_far
        if not written:
            stream.add(self._ids(self._render(safe, tools), marks), Source.PROMPT, 0)
            return (stream.close(),)
        whole = before if said_at == len(safe) else self._render(safe, tools)
        start = end_as_written(before, whole, self._turn_end())
        if start is None:  # the template rewrites for what stands after the last answer
            stream.breaks.append(DROPPED)
        else:
            rest = Bridge(marks=marks, messages=safe, count=said_at, whole=whole, start=start)
            stream.add_each(*self._labelled(rest, tools)[:2], len(written) - 1)
        return (*branches, stream.close())

    def _render(self, messages: Sequence[Message], tools: Tools, *, is_prompt: bool = False) -> str:
        return self.tokenizer.apply_template(
            messages,
            tools=tools,
            add_generation_prompt=is_prompt,
            template_kwargs=self.template_kwargs,
        )

    def _marked(
        self, messages: Sequence[Message], tools: Tools, *, is_prompt: bool
    ) -> tuple[str, Marks]:
        """The rendered text, in which marker strings inside message contents are broken up."""

        def rendered(form: Sequence[Message]) -> tuple[str, Marks]:
            marks, safe = self._plain.protect(form)
            return self._render(safe, tools, is_prompt=is_prompt), marks

        return _first_accepted(forms(messages)[::-1], rendered)

    def _ids(self, text: str, marks: Marks) -> list[int]:
        clean, cuts, _ = marks.read(text)
        return self._plain.ids(clean, cuts)

    def _turn_ends(
        self, history: Sequence[Message], after: str, tools: Tools
    ) -> tuple[int | None, str | None]:
        """Where the last turn ends in `after`, or why what was said cannot be found there."""
        end, last = self._turn_end(), history[-1]
        if last["role"] != "assistant" or len(history) == 1:
            start = end_as_written(self._render(history, tools), after, end)
            return start, None if start is not None else REWRITES
        opening = self._render(history[:-1], tools, is_prompt=True)
        if not after.startswith(opening):
            return None, REWRITES
        start = end_as_said(opening, last, after, end)
        if start is not None:
            return start, None
        before = self._render(history, tools)
        start = end_as_written(before, after, end)
        turn = before[len(opening) :]
        if start is None or not keeps_content(turn, last):
            return None, REWRITES
        if any(name not in turn for name in called_names(last)):
            return None, CALL_LEFT_OUT
        return start, None

    def _turn(self, messages: Sequence[Message], tools: Tools) -> tuple[str, str, bool]:
        """What stands before the last message, all with it, whether the first begins the second."""
        prompt = self._render(messages[:-1], tools, is_prompt=True)
        whole = self._render(messages, tools)
        is_kept = whole.startswith(prompt)
        return prompt if is_kept else common_start(prompt, whole), whole, is_kept

    def _turn_end(self) -> TurnEnd:
        end = self.tokenizer.turn_end
        assert end is not None, "a template that renders has an end of turn"
        return end

    def _is_next_speaker(self, token: int) -> bool:
        """Whether a token that ends a turn is none that the template closes turns with."""
        return token != self._turn_end().token

    def _labelled(
        self, bridge: Bridge, tools: Tools, *, is_prompt: bool = False
    ) -> tuple[list[int], list[Source], tuple[str, ...]]:
        """Tokens of a bridge; message contents are distinguished from template text."""
        clean, cuts, _ = bridge.marks.read(bridge.text)
        new = bridge.messages[bridge.count :]
        found = find_contents(clean, new, bridge.marks)
        if found is None:
            wrapped = [*bridge.messages[: bridge.count], *map(bridge.marks.wrap, new)]
            found = bridge.contents_in(self._render(wrapped, tools, is_prompt=is_prompt))
        encoded = self._plain.encode(clean, cuts, [region for region, _ in found or ()])
        notes = (ALTERED,) if encoded.is_altered else ()
        if encoded.spans is None or found is None:
            has_tool = any(message["role"] == "tool" for message in new)
            unknown = Source.TOOL if has_tool else Source.TEMPLATE
            return encoded.ids, [unknown] * len(encoded.ids), notes
        return encoded.ids, sources_of(encoded, [source for _, source in found]), notes


def _first_accepted(choices: Sequence[list[Message]], make: Callable[[list[Message]], T]) -> T:
    """What can be made of the first form of a conversation that the template does not refuse."""
    for form in choices[:-1]:
        try:
            return make(form)
        except UserError:
            continue
    return make(choices[-1])
