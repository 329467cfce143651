"""One raw row to one prompt, framed by system message and template; errors name file and row."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from luyen.base.errors import UserError, shortened
from luyen.base.records import Message, Prompt, make_prompt
from luyen.config.dataset_facts import PROMPT, fill_template
from luyen.config.schema.data import DataConfig
from luyen.data.messages import Complain, check_conversation, check_tools
from luyen.data.raw_values import is_object, parsed_json, require_plain

# Prompt framing (`data.system_prompt`, `data.prompt_template`).
#
# In a template `{prompt}`, or the name of the prompt's own column, is the text of the prompt
# (the row's plain text, or its last message of the user), and `{name}` is another column of the
# row. The column of the answer is refused: it would be given away.

TEMPLATE = "data.prompt_template"
_SYSTEM = ("system", "developer")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What is put around the prompt of every row.

    Example:
        >>> frame = Frame(system_prompt="Be brief.", template="{question} End with #### NUMBER.")
        >>> messages = ({"role": "user", "content": "1+1?"},)
        >>> [m["content"] for m in frame.around(messages, {"question": "1+1?"}, own="question")]
        ['Be brief.', '1+1? End with #### NUMBER.']
    """

    system_prompt: str | None = None
    """Text of a system message for conversations that begin without one; None: none is added."""
    template: str | None = None
    """Takes the place of the last message of the user; None: it stays."""

    def around(
        self,
        messages: Sequence[Message],
        columns: Mapping[str, Any],
        *,
        own: str = PROMPT,
        hidden: Collection[str | None] = (),
        complain: Complain = UserError,
    ) -> tuple[Message, ...]:
        """The messages in this frame; `own` is the prompt's column, `hidden` those of answers.

        Only the last user message changes; a system message is prepended if there is none yet.
        """
        found = list(messages)
        if self.template is not None:
            place = _last_of_user(found, complain)
            known = {**columns, PROMPT: found[place]["content"], own: found[place]["content"]}
            text = _filled(self.template, known, hidden, complain)
            found[place] = {**found[place], "content": text}
        if self.system_prompt is not None and (not found or found[0]["role"] not in _SYSTEM):
            found.insert(0, {"role": "system", "content": self.system_prompt})
        return tuple(found)


NOTHING = Frame()
"""Rows as they are."""


def _filled(
    template: str, known: Mapping[str, Any], hidden: Collection[str | None], complain: Complain
) -> str:
    def text_of(name: str) -> str:
        if name in hidden:
            why = f"`{{{name}}}` is the answer, which the policy is to find"
            raise complain(TEMPLATE, template, why, f"leave it out, or write {{{{{name}}}}}")
        value = known.get(name)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            why = f"`{{{name}}}` is no column of the row with text; it has {', '.join(known)}"
            raise complain(TEMPLATE, template, why, f"name a column, or write {{{{{name}}}}}")
        return str(value)

    return fill_template(template, text_of)


def _last_of_user(messages: Sequence[Message], complain: Complain) -> int:
    places = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not places:
        roles = [message["role"] for message in messages]
        why = f"{TEMPLATE} takes the place of the user's last message, and there is none"
        raise complain("messages", roles, why, "add one, or drop the template")
    return places[-1]


MESSAGES = "messages"
QUESTION, ANSWER = "question", "answer"
"""Columns of plain rows of questions and answers, such as those of GSM8K."""
_VERL = ("reward_model", "extra_info", "tools")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which column holds what.

    Example:
        >>> Columns(prompt="question", ground_truth="answer").data_source
        'data_source'
    """

    prompt: str = "prompt"
    """The prompt as messages; where a row lacks it, `messages` is taken, then `question`."""
    data_source: str = "data_source"
    """What selects the reward."""
    ground_truth: str | None = None
    """The answer; None: `reward_model.ground_truth`, as verl writes it; else the `answer` to a
    `question`."""
    string_prompts: Literal["refuse", "user"] = "refuse"
    """Whether a prompt that is plain text is refused or becomes one user message, as a `question`
    and what a template is put around always does."""
    frame: Frame = NOTHING
    """What is put around the prompt."""

    def prompt_in(self, fields: Mapping[str, Any]) -> str | None:
        """The column that holds the prompt of this row; None where there is none."""
        if fields.get(self.prompt) is not None:
            return self.prompt
        if fields.get(MESSAGES) is not None:
            return MESSAGES
        return QUESTION if isinstance(fields.get(QUESTION), str) else None

    def answer_in(self, fields: Mapping[str, Any]) -> str | None:
        """The column that holds the answer; None where it stands in `reward_model`."""
        if self.ground_truth is not None:
            return self.ground_truth
        is_bare = self.prompt_in(fields) == QUESTION and "reward_model" not in fields
        return ANSWER if is_bare and fields.get(ANSWER) is not None else None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RowAt:
    """Where a row stands; it writes the errors about it.

    Example:
        >>> print(RowAt(file="a.jsonl", number=3).error("prompt", 7, "no text", "write a string"))
        a.jsonl row 3: prompt = 7: no text. Fix: write a string
    """

    file: str
    """File or address."""
    number: int
    """Line of a JSONL file, otherwise the place in the file, from 1."""

    def __str__(self) -> str:
        return f"{self.file} row {self.number}"

    def error(self, field: str, value: Any, why: str, fix: str) -> UserError:
        """An error about a field of this row."""
        return UserError(f"{self}: {field}", shortened(value, most=80), why, fix)


def read_row(row: Any, at: RowAt, columns: Columns) -> Prompt:
    """The prompt of a verl row, a plain conversation, a tool-calling trace, or a `question`.

    Columns that are none of ours travel in `extra_info`; what the row's own `extra_info` says under
    the same name wins.

    Example:
        >>> row = {"prompt": [{"role": "user", "content": "1+1="}], "data_source": "sums",
        ...        "reward_model": {"ground_truth": "2"}, "ability": "math"}
        >>> prompt = read_row(row, RowAt(file="a.jsonl", number=1), Columns())
        >>> prompt.ground_truth, dict(prompt.extra_info)
        ('2', {'ability': 'math'})
    """
    if not is_object(row):
        raise at.error("row", row, "a row is an object with named fields", "write {...}")
    check_plain(row, at)
    fields = row
    name = columns.prompt_in(fields)
    if name is None:
        why = f"there is neither `{columns.prompt}` nor `{MESSAGES}`; it has {', '.join(fields)}"
        raise at.error(columns.prompt, None, why, "set data.prompt_key to the column")
    answer = columns.answer_in(fields)
    return make_prompt(
        columns.frame.around(
            _messages(fields[name], name, at, columns),
            fields,
            own=name,
            hidden={answer},
            complain=at.error,
        ),
        tools=check_tools(decoded(fields.get("tools"), "tools", at), at.error),
        data_source=_data_source(fields, at, columns),
        ground_truth=_ground_truth(fields, at, answer),
        extra_info=_extra_info(fields, at, {name, answer, columns.data_source}),
    )


def check_plain(row: Mapping[str, Any], at: RowAt) -> None:
    """A UserError with the column that is nested too deep, or holds text that is none."""
    for name, value in row.items():
        try:
            require_plain([name, value])
        except ValueError as error:
            raise at.error(
                ascii(name)[1:-1], None, str(error), "correct or drop the row"
            ) from error


def is_plain_text(row: Any, columns: Columns) -> bool:
    """Whether the row's prompt is a bare string, which skips the chat template elsewhere."""
    return is_object(row) and isinstance(row.get(columns.prompt_in(row) or MESSAGES), str)


def _messages(value: Any, name: str, at: RowAt, columns: Columns) -> list[Message]:
    if isinstance(value, str):
        is_meant = name == QUESTION or columns.frame.template is not None
        if columns.string_prompts == "refuse" and not is_meant:
            why = "a prompt is a list of messages; plain text would have to skip the chat template"
            fix = (
                'write [{"role": "user", "content": ...}], or set data.string_prompts=user '
                "to make each text one user message"
            )
            raise at.error(name, value, why, fix)
        value = [{"role": "user", "content": value}]
    return check_conversation(value, name, at.error)


def _data_source(fields: Mapping[str, Any], at: RowAt, columns: Columns) -> str:
    value = fields.get(columns.data_source)
    if value is None:
        return ""
    if not isinstance(value, str):
        why = "the source that selects a reward is a name"
        raise at.error(columns.data_source, value, why, "write a string")
    return value


def _ground_truth(fields: Mapping[str, Any], at: RowAt, answer: str | None) -> Any:
    if answer is not None:
        if answer not in fields:
            why = f"the row has no such column; it has {', '.join(fields)}"
            raise at.error(answer, None, why, "set data.ground_truth_key to one of them")
        return fields[answer]
    return _mapping(fields, "reward_model", at).get("ground_truth")


def _extra_info(
    fields: Mapping[str, Any], at: RowAt, taken: Collection[str | None]
) -> dict[str, Any]:
    known = {*taken, *_VERL}
    extra = {k: v for k, v in fields.items() if k not in known and v is not None}
    return extra | _mapping(fields, "extra_info", at)


def _mapping(fields: Mapping[str, Any], name: str, at: RowAt) -> dict[str, Any]:
    value = decoded(fields.get(name), name, at)
    if value is None:
        return {}
    if not is_object(value):
        raise at.error(name, value, "an object with named fields is expected", "write {...}")
    return value


def decoded(value: Any, name: str, at: RowAt) -> Any:
    """The value; text is read as JSON, since columnar files often store such columns so."""
    if not isinstance(value, str):
        return value
    try:
        return parsed_json(value)
    except ValueError as error:
        why = f"text in this column must be JSON: {error}"
        raise at.error(name, value, why, "store the value itself, or valid JSON") from error


# What the keys of `data` say of rows.


def columns_of(data: DataConfig) -> Columns:
    """Which columns of a row are read, and how."""
    return Columns(
        prompt=data.prompt_key,
        data_source=data.reward_fn_key,
        ground_truth=data.ground_truth_key,
        string_prompts=data.string_prompts,
        frame=frame_of(data),
    )


def frame_of(data: DataConfig) -> Frame:
    """What the block puts around every prompt."""
    return Frame(system_prompt=data.system_prompt, template=data.prompt_template)
