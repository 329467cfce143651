"""Quality filters: what is dropped is counted, and what is cut is cut by a stated rule.

The rule of cutting: only the content of the longest user message is shortened. System messages,
tool schemas, tool results and what the assistant said stay whole; where they alone are too long,
the row is refused with its file and number.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from luyen.base.errors import UserError
from luyen.base.records import Message, Prompt, make_prompt
from luyen.data.render import Renderer
from luyen.data.row_store import changed, selected
from luyen.data.sources import Dataset

Truncation: TypeAlias = Literal["error", "left", "right", "middle"]
_PIECES: dict[str, Callable[[list[int], int], tuple[list[int], list[int]]]] = {
    "left": lambda ids, keep: ([], ids[len(ids) - keep :]),
    "right": lambda ids, keep: (ids[:keep], []),
    "middle": lambda ids, keep: (ids[: (keep + 1) // 2], ids[len(ids) - keep // 2 :]),
}
"""Which side is cut off -> the tokens that stay, before and after the cut."""
_FAR = 16
"""A message of this many times the tokens that fit is shortened before it is tokenized."""


def drop_empty(dataset: Dataset) -> Dataset:
    """Drop rows that hold only system messages, and rows whose last message is blank."""
    return _keep(dataset, "empty", lambda prompt, _: not is_empty(prompt))


def drop_duplicates(dataset: Dataset) -> Dataset:
    """Without rows that ask the same and are judged by the same as an earlier row."""
    seen: set[int] = set()

    def is_new(prompt: Prompt, _: str) -> bool:
        uid = int(prompt.uid, 16)  # half the memory of its text
        known = uid in seen
        seen.add(uid)
        return not known

    return _keep(dataset, "duplicates", is_new)


def drop_overlong(dataset: Dataset, renderer: Renderer, *, max_prompt_length: int) -> Dataset:
    """Without rows whose prompt has more tokens than allowed."""
    return _keep(
        dataset,
        "overlong",
        lambda prompt, _: _overlong(prompt, renderer, max_prompt_length) is None,
    )


def truncate(
    dataset: Dataset, renderer: Renderer, *, max_prompt_length: int, truncation: Truncation
) -> Dataset:
    """With overlong prompts cut on the named side, or refused."""
    cut: set[int] = set()

    def within(place: int, prompt: Prompt) -> Prompt:
        said = _overlong(prompt, renderer, max_prompt_length)
        if said is None:
            return prompt
        origin = dataset.origins[place]
        if truncation == "error":
            fix = "raise data.max_prompt_length, or set data.filter_overlong_prompts=true"
            raise UserError(f"{origin}: prompt", said, f"more than {max_prompt_length}", fix)
        cut.add(place)
        return cut_prompt(prompt, renderer, max_prompt_length, truncation, origin)

    prompts = changed(dataset.prompts, within)
    counts = {**dataset.counts} | ({"truncated": len(cut)} if cut else {})
    return replace(dataset, prompts=prompts, counts=counts)


def is_empty(prompt: Prompt) -> bool:
    """Whether there is nothing to answer."""
    last = prompt.messages[-1]
    blank = not str(last["content"]).strip() and "tool_calls" not in last
    return blank or all(message["role"] in ("system", "developer") for message in prompt.messages)


def cut_prompt(
    prompt: Prompt, renderer: Renderer, most: int, truncation: Truncation, origin: str
) -> Prompt:
    """The prompt with its longest user message shortened until it fits.

    Of a message that is surely many times too long, what cannot stay is left out beforehand.
    """
    prompt = _with_messages(
        prompt, [_bounded(m, renderer, most, truncation) for m in prompt.messages]
    )
    encode = renderer.tokenizer.encode
    users = [i for i, message in enumerate(prompt.messages) if message["role"] == "user"]
    sizes = {i: len(encode(str(prompt.messages[i]["content"]))) for i in users}
    chosen = max(users, key=lambda i: sizes[i], default=None)
    keep = 0 if chosen is None else sizes[chosen]
    short = prompt
    while (length := _length(short, renderer)) > most:
        keep -= length - most
        if chosen is None or keep <= 0:
            rest = length - sizes.get(chosen or 0, 0) if short is prompt else length
            why = f"what may not be cut is about {rest} tokens of {most}"
            fix = "raise data.max_prompt_length, or shorten the system message and the tools"
            raise UserError(f"{origin}: prompt", f"{length} tokens", why, fix)
        content = str(prompt.messages[chosen]["content"])
        messages = list(prompt.messages)
        messages[chosen] = {
            **messages[chosen],
            "content": _cut(content, keep, truncation, renderer),
        }
        short = _with_messages(prompt, messages)
    return short


def _bounded(message: Message, renderer: Renderer, most: int, truncation: Truncation) -> Message:
    """A user's message as it is, or, far beyond what may stay of it, its beginning and its end."""
    content = str(message["content"])
    surely = renderer.tokenizer.least_tokens(content)
    if message["role"] != "user" or surely <= _FAR * most:
        return message
    kept = len(content) // surely * _FAR * most // 2
    before, after = content[:kept], content[-kept:]
    sides = {"left": after, "right": before, "middle": before + after, "error": content}
    return {**message, "content": sides[truncation]}


def _cut(content: str, keep: int, truncation: Truncation, renderer: Renderer) -> str:
    tokenizer = renderer.tokenizer
    before, after = _PIECES[truncation](tokenizer.encode(content), keep)
    # A cut inside a character of several bytes leaves a replacement sign at the edge.
    head = tokenizer.decode(before, skip_special=False).rstrip("\ufffd")
    return head + tokenizer.decode(after, skip_special=False).lstrip("\ufffd")


def _with_messages(prompt: Prompt, messages: Sequence[Message]) -> Prompt:
    return make_prompt(
        messages,
        tools=prompt.tools,
        data_source=prompt.data_source,
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
    )


def _length(prompt: Prompt, renderer: Renderer) -> int:
    return len(renderer.prompt_tokens(prompt.messages, prompt.tools))


def _overlong(prompt: Prompt, renderer: Renderer, most: int) -> str | None:
    """How many tokens a prompt has that has more than `most`; None where it fits.

    What is surely too long by its length as text is not read.
    """
    if sum(len(str(message["content"])) for message in prompt.messages) > most:
        least = renderer.least_tokens(prompt.messages, prompt.tools, is_prompt=True)
        if least > most:
            return f"at least {least} tokens"
    length = _length(prompt, renderer)
    return f"{length} tokens" if length > most else None


def _keep(dataset: Dataset, name: str, wanted: Callable[[Prompt, str], bool]) -> Dataset:
    pairs = zip(dataset.prompts, dataset.origins, strict=True)
    kept = array("Q", (place for place, pair in enumerate(pairs) if wanted(*pair)))
    dropped = len(dataset.prompts) - len(kept)
    if not dropped:
        return dataset
    return replace(
        dataset,
        prompts=selected(dataset.prompts, kept),
        origins=selected(dataset.origins, kept),
        files=tuple(dataset.files[place] for place in kept),
        counts={**dataset.counts} | ({name: dropped} if dropped else {}),
    )
