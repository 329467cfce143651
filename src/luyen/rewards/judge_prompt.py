"""What a judge is told about an answer."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from luyen.base.records import Message, Prompt
from luyen.config.schema.judge import Judge

_HOLE = re.compile(r"\{(question|answer|ground_truth)\}")


def messages_for(judge: Judge, prompt: Prompt, answer: str) -> list[Message]:
    """What the judge is told. Holes are filled once: what an answer says is never filled in again.

    Example:
        >>> from luyen.base.records import make_prompt
        >>> judge = Judge(base_url="http://localhost:1/v1", prompt="{question} -> {answer}?")
        >>> asked = make_prompt([{"role": "user", "content": "1+1"}])
        >>> messages_for(judge, asked, "{question}")[0]["content"]
        '1+1 -> {question}?'
    """
    truth = prompt.ground_truth
    said = {
        "question": question_of(prompt),
        "answer": answer,
        "ground_truth": "" if truth is None else str(truth),
    }
    text = _HOLE.sub(lambda hole: said[hole[1]], judge.prompt)
    system = [] if judge.system is None else [{"role": "system", "content": judge.system}]
    return [*system, {"role": "user", "content": text}]


def question_of(prompt: Prompt) -> str:
    """The one message of a prompt, or all of them, each with the role that spoke."""
    told = [(str(m.get("role", "")), _words(m.get("content"))) for m in prompt.messages]
    if len(told) == 1:
        return told[0][1]
    return "\n\n".join(f"{role}: {words}" for role, words in told)


def _words(content: Any) -> str:
    if isinstance(content, list | tuple):
        parts = cast(Sequence[Any], content)
        texts = [cast(Mapping[str, Any], p).get("text") for p in parts if isinstance(p, Mapping)]
        return "\n".join(str(text) for text in texts if text is not None)
    return "" if content is None else str(content)
