"""Where two conversations part: the prompt that both answer, found where no column holds it."""

import re
from collections.abc import Sequence

from luyen.base.records import Message
from luyen.data.formats.cells import Cells

_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):[ ]?")


def common_prompt(
    chosen: Sequence[Message], rejected: Sequence[Message]
) -> tuple[list[Message], list[Message], list[Message]] | None:
    """Prompt and the two continuations; None where they part in what somebody else says.

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
    chosen, rejected = _conversation(cells, "chosen"), _conversation(cells, "rejected")
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


def _conversation(cells: Cells, name: str) -> list[Message]:
    value = cells.value(name)
    if isinstance(value, str) and not cells.has("prompt"):
        found = marked_dialogue(value)
        if found is None:
            why = "plain text without a prompt: where the answer begins cannot be known"
            raise cells.error(name, value, why, "add a column `prompt`, or write messages")
        return found
    return cells.said(name, "assistant")


def _check_prompt(cells: Cells, found: Sequence[Message]) -> None:
    """A prompt that stands beside whole conversations must be what they begin with."""
    value = cells.value("prompt")
    texts = [message["content"] for message in found]
    given = [value] if isinstance(value, str) else [m["content"] for m in cells.said("prompt", "")]
    if any(text not in texts for text in given):
        why = "chosen and rejected are whole conversations that begin with another prompt"
        raise cells.error("prompt", value, why, "drop the column, or mend it")


def _speaks(message: Message) -> bool:
    return message["role"] == "assistant"
