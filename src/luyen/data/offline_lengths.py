"""How many tokens the longest sequence of a row has, and whether there is anything to learn."""

from collections.abc import Sequence

from luyen.base.records import Message
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

_SLACK = 2
"""What a template leaves out of an earlier turn in a later one is not counted this often."""
_SHORT = 100_000
"""Characters that are read within a fraction of a second."""


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


def is_surely_longer(row: AnyRow, renderer: Renderer, limit: int) -> bool:
    """Whether a row has more tokens than `limit`, as far as its length in characters tells.

    Example:
        >>> from luyen.data.tokenizer import load_tokenizer
        >>> shown = Renderer(load_tokenizer("builtin://arithmetic"))
        >>> is_surely_longer(TextRow(text="1" * 10**6), shown, 100)
        True
    """
    match row:
        case TextRow():
            least = renderer.tokenizer.least_tokens(row.text)
        case PreferenceRow():
            least = max(
                _least((*row.prompt, *said), renderer) for said in (row.chosen, row.rejected)
            )
        case LabelledRow():
            least = _least((*row.prompt, *row.completion), renderer)
        case SteppedRow():
            said = {"role": "assistant", "content": "".join(row.steps)}
            least = _least((*row.prompt, said), renderer)
        case ConversationRow():
            spoken = [i for i, m in enumerate(row.messages) if m["role"] == "assistant"]
            least = _least(row.messages[: spoken[-1] + 1], renderer) if spoken else 0
        case _:
            raise AssertionError("a prompt teaches nothing")
    return least > _SLACK * limit


def _least(messages: Sequence[Message], renderer: Renderer) -> int:
    """Below the tokens of the conversation; 0, unread, where it is not even long as text."""
    is_long = sum(len(str(message.get("content"))) for message in messages) > _SHORT
    return renderer.least_tokens(messages) if is_long else 0


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
