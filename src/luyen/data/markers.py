"""Chat-template markers inside rows: text that a tokenizer would take for structure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from luyen.base.records import Prompt

MARKERS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "[INST]",
    "[/INST]",
    "<<SYS>>",
)
"""Markers of the common templates: a row that has one was probably rendered before."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """A marker found in rows.

    Example:
        >>> str(Marked(marker="[INST]", rows=3, first="a.jsonl row 2"))
        '[INST] in 3 rows, first in a.jsonl row 2'
    """

    marker: str
    """The text."""
    rows: int
    """In how many rows it stands."""
    first: str
    """The first of them."""

    def __str__(self) -> str:
        unit = "row" if self.rows == 1 else "rows"
        return f"{self.marker} in {self.rows} {unit}, first in {self.first}"


def find_markers(
    prompts: Sequence[Prompt], origins: Sequence[str], special_tokens: Iterable[str]
) -> tuple[Marked, ...]:
    """Every marker that stands in the text of a message: common ones and the tokenizer's own."""
    searched = sorted({*MARKERS, *special_tokens})
    found: dict[str, list[str]] = {}
    for prompt, origin in zip(prompts, origins, strict=True):
        text = "\n".join(str(message["content"]) for message in prompt.messages)
        for marker in searched:
            if marker in text:
                found.setdefault(marker, []).append(origin)
    return tuple(
        Marked(marker=marker, rows=len(rows), first=rows[0]) for marker, rows in found.items()
    )
