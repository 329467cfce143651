"""How many tokens the longest sequence of a row has, and whether there is anything to learn."""

from luyen.data.formats.records import (
    AnyRow,
    ConversationRow,
    LabelledRow,
    PreferenceRow,
    SteppedRow,
    TextRow,
)
from luyen.data.formats.render import (
    render_answer,
    render_conversation,
    render_pair,
    render_steps,
)
from luyen.data.render import Renderer


def longest(row: AnyRow, renderer: Renderer) -> int:
    """Tokens of the longest sequence that the row makes, prompt included.

    Example:
        >>> from luyen.data.tokenizer import load_tokenizer
        >>> longest(TextRow(text="1+1=2"), Renderer(load_tokenizer("builtin://arithmetic")))
        5
    """
    match row:
        case PreferenceRow():
            pair = render_pair(row, renderer, allow_whole=True)
            return len(pair.prompt) + max(len(pair.chosen.tokens), len(pair.rejected.tokens))
        case LabelledRow():
            return len(render_answer(row, renderer).tokens)
        case SteppedRow():
            steps = render_steps(row, renderer)
            return len(steps.prompt) + len(steps.tokens)
        case TextRow():
            return len(renderer.tokenizer.encode(row.text))
        case ConversationRow():
            branches = render_conversation(row, renderer)
            return max(len(branch.rendered.tokens) for branch in branches)
        case _:
            raise AssertionError("a prompt teaches nothing")


def teaches_nothing(row: AnyRow, renderer: Renderer) -> bool:
    """Whether no token of a row could be learned from: nothing is said, weighted or labelled.

    Example:
        >>> from luyen.data.tokenizer import load_tokenizer
        >>> shown = Renderer(load_tokenizer("builtin://arithmetic"))
        >>> teaches_nothing(TextRow(text=""), shown), teaches_nothing(TextRow(text="1+1"), shown)
        (True, False)
    """
    match row:
        case TextRow():
            return not renderer.tokenizer.encode(row.text)
        case ConversationRow():
            return not row.learned
        case SteppedRow():
            return all(label is None for label in row.labels)
        case _:
            return False
