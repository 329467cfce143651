"""One raw row to one record, by the format of its file."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from luyen.base.records import Message, Prompt
from luyen.data.formats.cells import Cells
from luyen.data.formats.records import (
    AnyRow,
    ConversationRow,
    LabelledRow,
    PreferenceRow,
    SteppedRow,
    TextRow,
)
from luyen.data.raw_values import is_list
from luyen.data.rows import NOTHING, QUESTION, Columns, Frame, is_plain_text, read_row

# The common prompt of a chosen and a rejected conversation, where no column holds it.

_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):[ ]?")


def common_prompt(
    chosen: Sequence[Message], rejected: Sequence[Message]
) -> tuple[list[Message], list[Message], list[Message]] | None:
    """Prompt and the two continuations; None where another role's message is the first to differ.

    The prompt is the longest common beginning after which the assistant speaks in both.

    Example:
        >>> ask = {"role": "user", "content": "1+1="}
        >>> a, b = ({"role": "assistant", "content": text} for text in "23")
        >>> common_prompt([ask, a], [ask, b]) == ([ask], [a], [b])
        True
    """
    most = min(len(chosen), len(rejected)) - 1
    cut = 0
    while cut < most and chosen[cut] == rejected[cut]:
        cut += 1
    while cut > 0 and not (_speaks(chosen[cut]) and _speaks(rejected[cut])):
        cut -= 1
    if cut == 0:
        return None
    return list(chosen[:cut]), list(chosen[cut:]), list(rejected[cut:])


def marked_dialogue(text: str) -> list[Message] | None:
    """Messages of a text such as Anthropic's `Human: ... Assistant: ...`; None for other text.

    Example:
        >>> marked_dialogue("\\n\\nHuman: 1+1=\\n\\nAssistant: 2")[1]
        {'role': 'assistant', 'content': '2'}
    """
    if not _TURN.match(text):
        return None
    pieces = _TURN.split(text)[1:]
    return [
        {"role": _SPEAKERS[who], "content": said.strip()}
        for who, said in zip(pieces[::2], pieces[1::2], strict=True)
    ]


def pair(cells: Cells) -> tuple[list[Message], list[Message], list[Message]]:
    """Prompt, chosen and rejected of a row, whether the prompt has a column of its own or not."""
    chosen, rejected = _marked_turns(cells, "chosen"), _marked_turns(cells, "rejected")
    begun = {name: _speaks(said[0]) for name, said in (("chosen", chosen), ("rejected", rejected))}
    if all(begun.values()):
        if not cells.has("prompt"):
            why = "nothing stands before the answers, and there is no column `prompt`"
            raise cells.error("chosen", chosen[0], why, "add the prompt")
        return cells.said("prompt", "user"), chosen, rejected
    if any(begun.values()):
        whole = "chosen" if begun["rejected"] else "rejected"
        why = "the other one begins with the assistant, this one does not"
        raise cells.error(whole, cells.value(whole), why, "write answers only, or both whole")
    found = common_prompt(chosen, rejected)
    if found is None:
        why = (
            "chosen and rejected part before the assistant speaks, so they answer no common prompt"
        )
        raise cells.error("rejected", rejected[0], why, "pair answers to the same prompt")
    if cells.has("prompt"):
        _check_prompt(cells, found[0])
    return found


def _marked_turns(cells: Cells, name: str) -> list[Message]:
    value = cells.value(name)
    if isinstance(value, str) and not cells.has("prompt"):
        found = marked_dialogue(value)
        if found is None:
            why = "plain text without a prompt: where the answer begins cannot be known"
            raise cells.error(name, value, why, "add a column `prompt`, or write messages")
        return found
    return cells.said(name, "assistant")


def _check_prompt(cells: Cells, found: Sequence[Message]) -> None:
    """Raise unless a prompt column next to whole conversations is what they begin with."""
    value = cells.value("prompt")
    texts = [message["content"] for message in found]
    given = [value] if isinstance(value, str) else [m["content"] for m in cells.said("prompt", "")]
    if any(text not in texts for text in given):
        why = "chosen and rejected are whole conversations that begin with another prompt"
        raise cells.error("prompt", value, why, "drop or correct the column")


def _speaks(message: Message) -> bool:
    return message["role"] == "assistant"


PROMPTS, GROUND_TRUTH = "prompts", "ground_truth"
ANSWERS = ("answer", "output", "completion", "completions", "chosen", "rejected")
"""Columns that hold what is to be learned: no template may show them."""


def parse_row(cells: Cells, frame: Frame = NOTHING) -> AnyRow:
    """The record of a row in a frame; a UserError with file, row, column, reason and fix."""
    if cells.format.form.name == PROMPTS:
        return _prompts(cells, frame)
    row = PARSERS[cells.format.form.name](cells)
    return row if frame == NOTHING else _framed(row, cells, frame)


def _framed(row: AnyRow, cells: Cells, frame: Frame) -> AnyRow:
    """The row with the frame around what it asks; text alone asks nothing."""
    if isinstance(row, TextRow):
        why = "the row is plain text without a prompt, and a template or system prompt is set"
        fix = "drop data.prompt_template and data.system_prompt"
        raise cells.error("text", row.text, why, fix)
    hidden = {cells.format.column(name) for name in cells.format.form.needs if name in ANSWERS}
    assert not isinstance(row, Prompt), "prompts are read in their frame"
    before = row.messages if isinstance(row, ConversationRow) else row.prompt
    framed = frame.around(before, cells.raw(), hidden=hidden, complain=cells.at.error)
    if isinstance(row, ConversationRow):
        weights = (*(0.0 for _ in framed[len(before) :]), *row.weights)
        return replace(row, messages=framed, weights=weights)
    return replace(row, prompt=framed)


def _prompts(cells: Cells, frame: Frame = NOTHING) -> Prompt:
    """The prompt as online training reads it."""
    columns = Columns(
        prompt=cells.format.column("prompt"),
        ground_truth=cells.format.columns.get(GROUND_TRUTH),
        string_prompts=cells.strings,
        frame=frame,
    )
    raw = dict(cells.raw())
    is_meant = columns.prompt_in(raw) == QUESTION
    cells.num_texts += cells.strings == "user" and is_plain_text(raw, columns) and not is_meant
    return read_row(raw, cells.at, columns)


def _question_answer(cells: Cells) -> ConversationRow:
    framed = {"role": "user", "content": cells.text("question")}
    answer = {"role": "assistant", "content": cells.text("answer")}
    return _learned(cells, "answer", [framed, answer], (0.0, 1.0))


def _conversation(cells: Cells) -> ConversationRow:
    return _learned(cells, "messages", *cells.messages("messages"))


def _sharegpt(cells: Cells) -> ConversationRow:
    messages, weights = cells.messages("conversations")
    before = _system(cells)
    return _learned(
        cells, "conversations", [*before, *messages], (*(0.0 for _ in before), *weights)
    )


def _prompt_completion(cells: Cells) -> ConversationRow:
    prompt, completion = cells.said("prompt", "user"), _answer(cells, "completion")
    weights = [0.0] * len(prompt) + [float(m["role"] == "assistant") for m in completion]
    return _learned(cells, "completion", [*prompt, *completion], tuple(weights))


def _alpaca(cells: Cells) -> ConversationRow:
    messages = [*_alpaca_prompt(cells), {"role": "assistant", "content": cells.text("output")}]
    weights = tuple(float(message["role"] == "assistant") for message in messages)
    return _learned(cells, "output", messages, weights)


def _text(cells: Cells) -> TextRow:
    return TextRow(text=cells.text("text"), extra_info=cells.extra_info())


def _preference(cells: Cells) -> PreferenceRow:
    prompt, chosen, rejected = pair(cells)
    return _preferred(cells, prompt, chosen, rejected)


def _alpaca_preference(cells: Cells) -> PreferenceRow:
    chosen = [{"role": "assistant", "content": cells.text("chosen")}]
    rejected = [{"role": "assistant", "content": cells.text("rejected")}]
    return _preferred(cells, _alpaca_prompt(cells), chosen, rejected)


def _sharegpt_preference(cells: Cells) -> PreferenceRow:
    prompt = [*_system(cells), *cells.messages("conversations")[0]]
    return _preferred(cells, prompt, _answer(cells, "chosen"), _answer(cells, "rejected"))


def _labelled(cells: Cells) -> LabelledRow:
    return LabelledRow(
        prompt=tuple(cells.said("prompt", "user")),
        completion=tuple(_answer(cells, "completion")),
        label=cells.truth("label"),
        **cells.shared(),
    )


def _alpaca_labelled(cells: Cells) -> LabelledRow:
    return LabelledRow(
        prompt=tuple(_alpaca_prompt(cells)),
        completion=({"role": "assistant", "content": cells.text("output")},),
        label=cells.truth("kto_tag"),
        **cells.shared(),
    )


def _sharegpt_labelled(cells: Cells) -> LabelledRow:
    messages = cells.messages("conversations")[0]
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        why = "the last message is the answer that the label judges, and the assistant says it"
        raise cells.error("conversations", messages[-1], why, "add the answer")
    return LabelledRow(
        prompt=(*_system(cells), *messages[:-1]),
        completion=(messages[-1],),
        label=cells.truth("kto_tag"),
        **cells.shared(),
    )


def _stepped(cells: Cells) -> SteppedRow:
    steps, labels = cells.each("completions"), cells.each("labels")
    if not steps or not all(isinstance(step, str) for step in steps):
        raise cells.error("completions", steps, "steps are a list of texts", 'write ["...", ...]')
    if len(steps) != len(labels):
        why = f"there are {len(steps)} steps and {len(labels)} labels"
        raise cells.error("labels", labels, why, "write one label per step")
    for label in labels:
        if label is not None and not (isinstance(label, bool | int | float) and 0 <= label <= 1):
            why = "a label is true, false, a number from 0 to 1, or null where there is none"
            raise cells.error("labels", label, why, "write one of these")
    return SteppedRow(
        prompt=tuple(cells.said("prompt", "user")),
        steps=tuple(steps),
        labels=tuple(None if label is None else float(label) for label in labels),
        **cells.shared(),
    )


PARSERS: dict[str, Callable[[Cells], AnyRow]] = {
    PROMPTS: _prompts,
    "conversation": _conversation,
    "sharegpt": _sharegpt,
    "prompt-completion": _prompt_completion,
    "alpaca": _alpaca,
    "question-answer": _question_answer,
    "text": _text,
    "preference": _preference,
    "alpaca-preference": _alpaca_preference,
    "sharegpt-preference": _sharegpt_preference,
    "labelled": _labelled,
    "alpaca-labelled": _alpaca_labelled,
    "sharegpt-labelled": _sharegpt_labelled,
    "stepped": _stepped,
}
"""Name of a format -> how its rows are read."""


def _learned(
    cells: Cells, column: str, messages: Sequence[Message], weights: tuple[float, ...]
) -> ConversationRow:
    if all(message["role"] != "assistant" for message in messages):
        roles = [message["role"] for message in messages]
        why = "the assistant says nothing, so there is nothing to learn"
        raise cells.error(column, roles, why, "add the answer, or drop the row")
    return ConversationRow(messages=tuple(messages), weights=weights, **cells.shared())


def _preferred(
    cells: Cells, prompt: Sequence[Message], chosen: Sequence[Message], rejected: Sequence[Message]
) -> PreferenceRow:
    return PreferenceRow(
        prompt=tuple(prompt),
        chosen=tuple(chosen),
        rejected=tuple(rejected),
        margin=cells.number("margin"),
        **cells.shared(),
    )


def _answer(cells: Cells, name: str) -> list[Message]:
    """A continuation: the assistant begins."""
    messages = cells.said(name, "assistant")
    if messages[0]["role"] != "assistant":
        why = "a continuation of the prompt begins with the assistant"
        raise cells.error(name, messages[0], why, "move messages of other roles into the prompt")
    return messages


def _alpaca_prompt(cells: Cells) -> list[Message]:
    """What stands before the answer of an alpaca row: system, history, instruction and input."""
    messages: list[Message] = _system(cells)
    for i, turn in enumerate(cells.each("history") if cells.has("history") else ()):
        messages += _exchange(turn, i, cells)
    parts = [cells.text("instruction"), cells.optional_text("input")]
    return [*messages, {"role": "user", "content": "\n".join(part for part in parts if part)}]


def _exchange(turn: Any, number: int, cells: Cells) -> list[Message]:
    if not is_list(turn) or len(turn) != 2 or not all(isinstance(said, str) for said in turn):
        why = "earlier turns are pairs of a question and an answer"
        raise cells.error(f"history[{number}]", turn, why, 'write [["...", "..."], ...]')
    return [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]


def _system(cells: Cells) -> list[Message]:
    text = cells.optional_text("system")
    return [{"role": "system", "content": text}] if text else []
