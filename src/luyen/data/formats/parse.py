"""One raw row to one record, by the format of its file."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from luyen.base.records import Message, Prompt, make_prompt
from luyen.data.formats.cells import Cells
from luyen.data.formats.pairs import pair
from luyen.data.formats.records import (
    AnyRow,
    ConversationRow,
    LabelledRow,
    PreferenceRow,
    SteppedRow,
    TextRow,
)
from luyen.data.framing import NOTHING, Frame
from luyen.data.rows import Columns, read_row
from luyen.data.shapes import is_list

ANSWERS = ("answer", "output", "completion", "completions", "chosen", "rejected")
"""Columns that hold what is to be learned: no template may show them."""


def parse_row(cells: Cells, frame: Frame = NOTHING) -> AnyRow:
    """The record of a row in a frame; a UserError with file, row, column, reason and fix."""
    row = PARSERS[cells.format.form.name](cells)
    return row if frame == NOTHING else _framed(row, cells, frame)


def _framed(row: AnyRow, cells: Cells, frame: Frame) -> AnyRow:
    """The row with the frame around what it asks; text alone asks nothing."""
    if isinstance(row, TextRow):
        why = "the row is plain text without a prompt, and a template or system prompt is set"
        fix = "drop data.prompt_template and data.system_prompt"
        raise cells.error("text", row.text, why, fix)
    hidden = {cells.format.column(name) for name in cells.format.form.needs if name in ANSWERS}
    is_whole = isinstance(row, ConversationRow | Prompt)
    before = row.messages if is_whole else row.prompt
    asked = frame.around(before, cells.raw(), hidden=hidden, complain=cells.at.error)
    if isinstance(row, ConversationRow):
        weights = (*(0.0 for _ in asked[len(before) :]), *row.weights)
        return replace(row, messages=asked, weights=weights)
    if isinstance(row, Prompt):
        return make_prompt(
            asked,
            tools=row.tools,
            data_source=row.data_source,
            ground_truth=row.ground_truth,
            extra_info=row.extra_info,
        )
    return replace(row, prompt=asked)


def _prompts(cells: Cells) -> Prompt:
    column = cells.format.column("prompt")
    is_text = isinstance(cells.value("prompt"), str)
    cells.num_texts += is_text and cells.strings == "user"
    columns = Columns(prompt=column, string_prompts=cells.strings)
    return read_row(dict(cells.raw()), cells.at, columns)


def _question_answer(cells: Cells) -> ConversationRow:
    asked = {"role": "user", "content": cells.text("question")}
    answer = {"role": "assistant", "content": cells.text("answer")}
    return _learned(cells, "answer", [asked, answer], (0.0, 1.0))


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
    messages = [*_asked(cells), {"role": "assistant", "content": cells.text("output")}]
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
    return _preferred(cells, _asked(cells), chosen, rejected)


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
        prompt=tuple(_asked(cells)),
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
            why = "a label is true, false, a number from 0 to 1, or null where nobody judged"
            raise cells.error("labels", label, why, "mend the label")
    return SteppedRow(
        prompt=tuple(cells.said("prompt", "user")),
        steps=tuple(steps),
        labels=tuple(None if label is None else float(label) for label in labels),
        **cells.shared(),
    )


PARSERS: dict[str, Callable[[Cells], AnyRow]] = {
    "prompts": _prompts,
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
        raise cells.error(name, messages[0], why, "move what others say into the prompt")
    return messages


def _asked(cells: Cells) -> list[Message]:
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
