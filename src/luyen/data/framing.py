"""What the `data` block puts around every prompt: a system message, a template of the question.

In a template `{prompt}`, or the name of the prompt's own column, is the text of the prompt (the
row's plain text, or its last message of the user), and `{name}` is another column of the row. The
column of the answer is refused: it would be given away.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.records import Message
from luyen.config.prompt_template import PROMPT, filled
from luyen.data.messages import Complain

TEMPLATE = "data.prompt_template"
_SYSTEM = ("system", "developer")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What is put around the prompt of every row.

    Example:
        >>> frame = Frame(system_prompt="Be brief.", template="{question} End with #### NUMBER.")
        >>> asked = ({"role": "user", "content": "1+1?"},)
        >>> [m["content"] for m in frame.around(asked, {"question": "1+1?"}, own="question")]
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

        Only the last message of the user changes, and the beginning where nobody of the system
        speaks yet.
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

    return filled(template, text_of)


def _last_of_user(messages: Sequence[Message], complain: Complain) -> int:
    places = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not places:
        roles = [message["role"] for message in messages]
        why = f"{TEMPLATE} takes the place of the user's last message, and there is none"
        raise complain("messages", roles, why, "add one, or drop the template")
    return places[-1]
