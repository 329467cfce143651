"""Rows as tokens: a prompt once, what continues it, and which tokens are trained on.

A pair is laid down so that one pass over the prompt serves both answers. That is right only where
the template writes the same tokens before either answer; where it does not, the row is refused or,
if the caller allows it, both are rendered whole and the pair says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.records import Message, Prompt, Source
from luyen.data.formats.layout import PROMPT, Part, Stretch, label_of, verdict_of
from luyen.data.formats.records import (
    STEP_END,
    AnyRow,
    ConversationRow,
    LabelledRow,
    PreferenceRow,
    SteppedRow,
    TextRow,
)
from luyen.data.render import Rendered, Renderer
from luyen.data.tokenizer import Tokenizer

WHOLE = "the template writes other tokens before the two answers: both are rendered whole"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """Token ids of a continuation of a prompt.

    Example:
        >>> Continuation(tokens=(7, 8), sources=(Source.SAMPLED, Source.TEMPLATE)).mask
        (True, False)
    """

    tokens: tuple[int, ...]
    """Ids, in order."""
    sources: tuple[Source, ...]
    """Where each came from."""

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.sources), "streams differ in length"

    @property
    def mask(self) -> tuple[bool, ...]:
        """Which tokens count: those that the assistant wrote."""
        return tuple(source == Source.SAMPLED for source in self.sources)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedAnswer:
    """A prompt and one continuation.

    Example:
        >>> said = Continuation(tokens=(7,), sources=(Source.SAMPLED,))
        >>> RenderedAnswer(prompt=(5, 6), answer=said).tokens
        (5, 6, 7)
    """

    prompt: tuple[int, ...]
    """Tokens after which the assistant speaks."""
    answer: Continuation
    """What it says, and what happens between its turns."""
    notes: tuple[str, ...] = ()
    """What the template did that inference would not see."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The whole sequence."""
        return self.prompt + self.answer.tokens


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPair:
    """A prompt and two continuations; prompt plus either is what the template writes.

    Example:
        >>> yes, no = (Continuation(tokens=(t,), sources=(Source.SAMPLED,)) for t in (7, 8))
        >>> RenderedPair(prompt=(5, 6), chosen=yes, rejected=no).num_tokens
        4
    """

    prompt: tuple[int, ...]
    """Tokens that both begin with."""
    chosen: Continuation
    """The better one."""
    rejected: Continuation
    """The worse one."""
    notes: tuple[str, ...] = ()
    """Why the prompt is not the whole prompt, where it is not, and what else was noticed."""

    @property
    def num_tokens(self) -> int:
        """Tokens to compute when the prompt is computed once."""
        return len(self.prompt) + len(self.chosen.tokens) + len(self.rejected.tokens)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedSteps:
    """A prompt and an answer in steps, with the token on which each step is judged.

    Example:
        >>> RenderedSteps(prompt=(5,), tokens=(7, 1, 8, 1), ends=(1, 3), labels=(1.0, None)).ends
        (1, 3)
    """

    prompt: tuple[int, ...]
    """Tokens after which the assistant speaks."""
    tokens: tuple[int, ...]
    """The steps, each followed by its end, and the end of the turn."""
    ends: tuple[int, ...]
    """For each step the place of its last token in `tokens`."""
    labels: tuple[float | None, ...]
    """How right each step is; None for a step without a label."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """A branch of a conversation and how much each of its tokens counts.

    Example:
        >>> rendered = Rendered(tokens=(5,), sources=(Source.PROMPT,), turns=(0,))
        >>> Weighted(rendered=rendered, weights=(0.0,)).weights
        (0.0,)
    """

    rendered: Rendered
    """The tokens and where each came from."""
    weights: tuple[float, ...]
    """The weight of the message that each sampled token belongs to; 0 for every other token."""


def render_pair(
    row: PreferenceRow, renderer: Renderer, *, allow_whole: bool = False
) -> RenderedPair:
    """The pair as tokens. `allow_whole` takes a template that lets the answer change the prompt.

    Example:
        >>> from luyen.data.tokenizer import load_tokenizer
        >>> say = lambda role, text: ({"role": role, "content": text},)
        >>> row = PreferenceRow(prompt=say("user", "1+1="), chosen=say("assistant", "2"),
        ...                     rejected=say("assistant", "3"))
        >>> pair = render_pair(row, Renderer(load_tokenizer("builtin://arithmetic")))
        >>> sum(pair.chosen.mask), len(pair.prompt)
        (2, 23)
    """
    fitting = for_row(renderer, row.template_kwargs)
    text = _prompt_text(row, fitting)
    chosen = _answer(row, row.chosen, fitting, text)
    rejected = _answer(row, row.rejected, fitting, text)
    notes = tuple(dict.fromkeys(chosen.notes + rejected.notes))
    if chosen.prompt == rejected.prompt:
        return RenderedPair(
            prompt=chosen.prompt, chosen=chosen.answer, rejected=rejected.answer, notes=notes
        )
    if not allow_whole:
        why = "the chat template writes other tokens before the chosen than before the rejected"
        fix = "use a template that leaves the prompt alone, or allow whole rendering"
        raise UserError("chosen, rejected", renderer.tokenizer.path, why, fix)
    shared = _common(chosen.prompt, rejected.prompt)
    return RenderedPair(
        prompt=chosen.prompt[:shared],
        chosen=_longer(chosen, shared),
        rejected=_longer(rejected, shared),
        notes=(*notes, WHOLE),
    )


def render_answer(row: LabelledRow, renderer: Renderer) -> RenderedAnswer:
    """A labelled answer as tokens."""
    fitting = for_row(renderer, row.template_kwargs)
    return _answer(row, row.completion, fitting, _prompt_text(row, fitting))


def render_steps(row: SteppedRow, renderer: Renderer) -> RenderedSteps:
    """An answer in steps; each is encoded by itself, as it would be judged while it grows."""
    fitting = for_row(renderer, row.template_kwargs)
    prompt = fitting.prompt_tokens(row.prompt, row.tools)
    tokens, ends = list[int](), list[int]()
    for step in row.steps:
        tokens += renderer.tokenizer.encode(step + STEP_END)
        ends.append(len(tokens) - 1)
    end = renderer.tokenizer.turn_end
    tokens += renderer.tokenizer.encode(end.text) if end is not None else []
    return RenderedSteps(
        prompt=tuple(prompt), tokens=tuple(tokens), ends=tuple(ends), labels=row.labels
    )


def render_conversation(row: ConversationRow, renderer: Renderer) -> tuple[Weighted, ...]:
    """A conversation with the weight of every token, in as many branches as the template makes."""
    fitting = for_row(renderer, row.template_kwargs)
    pairs = zip(row.messages, row.weights, strict=True)
    by_turn = [weight for message, weight in pairs if message["role"] == "assistant"]
    found: list[Weighted] = []
    for branch in fitting.conversation(row.messages, row.tools):
        places = zip(branch.sources, branch.turns, strict=True)
        weights = [by_turn[turn] if source == Source.SAMPLED else 0.0 for source, turn in places]
        found.append(Weighted(rendered=branch, weights=tuple(weights)))
    return tuple(found)


def for_row(renderer: Renderer, template_kwargs: Mapping[str, Any]) -> Renderer:
    """The renderer with the row's own arguments of the template, which win over the run's."""
    if not template_kwargs:
        return renderer
    return Renderer(
        renderer.tokenizer, template_kwargs={**renderer.template_kwargs, **template_kwargs}
    )


def _prompt_text(row: PreferenceRow | LabelledRow, renderer: Renderer) -> str:
    """The prompt as the template writes it where nothing follows."""
    tokens = renderer.tokens_of(row.prompt, row.tools)
    return renderer.tokenizer.decode(tokens, skip_special=False)


def _answer(
    row: PreferenceRow | LabelledRow, answer: Sequence[Message], renderer: Renderer, text: str
) -> RenderedAnswer:
    """The last branch, cut where the answer begins; every turn of the answer must stand in it.

    What stands before the cut begins with the `text` of the whole prompt, whatever opens the
    assistant's turn; otherwise text of other roles would be learned.
    """
    branches = renderer.conversation([*row.prompt, *answer], row.tools)
    first = sum(message["role"] == "assistant" for message in row.prompt)
    if any(_sampled_from(branch, first) is not None for branch in branches[:-1]):
        why = "the chat template rewrites an earlier turn of the answer when a later one follows"
        fix = "use a template that keeps what was said, or answers of one turn"
        raise UserError("answer", renderer.tokenizer.path, why, fix)
    last = branches[-1]
    cut = _sampled_from(last, first)
    if cut is None:
        why = "the chat template writes nothing of the answer"
        raise UserError("answer", list(answer), why, "correct the row or the template")
    before = renderer.tokenizer.decode(last.tokens[:cut], skip_special=False)
    if not before.startswith(text):
        why = "the chat template writes the prompt in another way once an answer follows"
        raise UserError("prompt", renderer.tokenizer.path, why, "correct the template")
    rest = Continuation(tokens=last.tokens[cut:], sources=last.sources[cut:])
    notes = tuple(text for text in last.breaks if not text.endswith("was said before"))
    return RenderedAnswer(prompt=last.tokens[:cut], answer=rest, notes=notes)


def _sampled_from(branch: Rendered, first: int) -> int | None:
    """Place of the first token that was sampled in turn `first` or later."""
    places = enumerate(zip(branch.sources, branch.turns, strict=True))
    return next((i for i, (s, turn) in places if s == Source.SAMPLED and turn >= first), None)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _longer(answer: RenderedAnswer, shared: int) -> Continuation:
    """The answer with that part of its prompt that the other one does not share."""
    before = answer.prompt[shared:]
    return Continuation(
        tokens=before + answer.answer.tokens,
        sources=(Source.PROMPT,) * len(before) + answer.answer.sources,
    )


# Rows as the token sequences that training sees, for display.


def in_tokens(row: AnyRow, renderer: Renderer) -> tuple[Part, ...]:
    """The parts of a row, the prompt first. A UserError where the template refuses the row.

    Example:
        >>> from luyen.data.tokenizer import load_tokenizer
        >>> renderer = Renderer(load_tokenizer("builtin://arithmetic"))
        >>> [(part.name, part.length) for part in in_tokens(TextRow(text="1+1"), renderer)]
        [('text', 3)]
    """
    return tuple(_parts(row, renderer))


def _parts(row: AnyRow, renderer: Renderer) -> Iterator[Part]:
    tokenizer = renderer.tokenizer
    match row:
        case TextRow():
            yield _tokens("text", tokenizer.encode(row.text), "text", tokenizer, is_learned=True)
        case Prompt():
            yield _tokens(
                PROMPT, renderer.prompt_tokens(row.messages, row.tools), PROMPT, tokenizer
            )
        case ConversationRow():
            branches = render_conversation(row, renderer)
            for i, branch in enumerate(branches):
                name = "conversation" if len(branches) == 1 else f"branch {i}"
                rendered, learned = branch.rendered, [weight > 0 for weight in branch.weights]
                yield _masked(
                    name, rendered.tokens, rendered.sources, learned, tokenizer, rendered.breaks
                )
        case PreferenceRow():
            pair = render_pair(row, renderer, allow_whole=True)
            yield _tokens(PROMPT, pair.prompt, PROMPT, tokenizer)
            yield _going_on("chosen", pair.chosen, tokenizer, pair.notes)
            yield _going_on("rejected", pair.rejected, tokenizer)
        case LabelledRow():
            answer = render_answer(row, renderer)
            yield _tokens(PROMPT, answer.prompt, PROMPT, tokenizer)
            yield _going_on(label_of(row), answer.answer, tokenizer, answer.notes)
        case SteppedRow():
            steps = render_steps(row, renderer)
            yield _tokens(PROMPT, steps.prompt, PROMPT, tokenizer)
            start = 0
            for end, label in zip(steps.ends, steps.labels, strict=True):
                ids = steps.tokens[start : end + 1]
                judged = [False] * (len(ids) - 1) + [label is not None]
                sources = [Source.PROMPT] * len(ids)
                yield _masked(verdict_of(label), ids, sources, judged, tokenizer, ())
                start = end + 1


def _tokens(
    name: str, ids: Sequence[int], who: str, tokenizer: Tokenizer, *, is_learned: bool = False
) -> Part:
    text = tokenizer.decode(ids, skip_special=False)
    stretch = Stretch(text=text, who=who, is_learned=is_learned)
    learned = len(ids) if is_learned else 0
    return Part(
        name=name,
        stretches=(stretch,),
        length=len(ids),
        learned=learned,
        notes=(),
        unknown=sum(token == tokenizer.unknown_id for token in ids),
    )


def _going_on(
    name: str, answer: Continuation, tokenizer: Tokenizer, notes: tuple[str, ...] = ()
) -> Part:
    return _masked(name, answer.tokens, answer.sources, answer.mask, tokenizer, notes)


def _masked(
    name: str,
    ids: Sequence[int],
    sources: Sequence[Source],
    learned: Sequence[bool],
    tokenizer: Tokenizer,
    notes: tuple[str, ...],
) -> Part:
    stretches: list[Stretch] = []
    triples = zip(ids, sources, learned, strict=True)
    for (source, counts), group in groupby(triples, key=lambda triple: triple[1:]):
        text = tokenizer.decode([token for token, _, _ in group], skip_special=False)
        stretches.append(Stretch(text=text, who=source.name.lower(), is_learned=counts))
    return Part(
        name=name,
        stretches=tuple(stretches),
        length=len(ids),
        learned=sum(learned),
        notes=notes,
        unknown=sum(token == tokenizer.unknown_id for token in ids),
    )
