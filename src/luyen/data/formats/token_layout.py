"""A row laid out as the tokens that training sees."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from luyen.base.records import Prompt, Source
from luyen.data.formats.layout import PROMPT, Part, Stretch, label_of, verdict_of
from luyen.data.formats.records import (
    AnyRow,
    ConversationRow,
    LabelledRow,
    PreferenceRow,
    SteppedRow,
    TextRow,
)
from luyen.data.formats.render import (
    Continuation,
    render_answer,
    render_conversation,
    render_pair,
    render_steps,
)
from luyen.data.render import Renderer
from luyen.data.tokenizer import Tokenizer


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
                told, learned = branch.rendered, [weight > 0 for weight in branch.weights]
                yield _masked(name, told.tokens, told.sources, learned, tokenizer, told.breaks)
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
