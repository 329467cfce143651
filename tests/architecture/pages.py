"""Markdown as the documentation tests see it: blocks, spans, links, headings, commands."""

import re
import shlex
from collections.abc import Iterator

from tests.architecture.tree import ROOT

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
SHELLS = ("console", "bash", "sh")


def pages() -> Iterator[tuple[str, str]]:
    """(path from the root, text) of every page that a reader may open."""
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]:
        yield path.relative_to(ROOT).as_posix(), path.read_text()


def blocks(text: str, *languages: str) -> list[str]:
    """Bodies of the fenced blocks in one of the languages."""
    return [body for language, body in FENCE.findall(text) if language in languages]


def spans(text: str) -> list[str]:
    """Inline code outside fenced blocks."""
    return SPAN.findall(FENCE.sub("", text))


def commands(text: str, program: str) -> list[list[str]]:
    """Command lines of one program, as words, in inline code and in shell blocks."""
    lines = [line.removeprefix("$ ") for b in blocks(text, *SHELLS) for line in b.splitlines()]
    lines += spans(text)
    words = [shlex.split(line, comments=True) for line in lines if line.startswith(f"{program} ")]
    return [w for w in words if len(w) > 1]


def links(text: str) -> list[str]:
    """Targets of the links that stay inside the repository."""
    return [t for t in LINK.findall(FENCE.sub("", text)) if "://" not in t and "mailto:" not in t]


def anchors(text: str) -> set[str]:
    """What a link may put after `#` for this page."""
    titles = HEADING.findall(FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", t.lower()).strip().replace(" ", "-") for t in titles}


def sections(text: str) -> dict[str, str]:
    """Title -> body of the second-level sections of a page."""
    parts = re.split(r"^## +(.*)$", text, flags=re.MULTILINE)
    return dict(zip((title.strip() for title in parts[1::2]), parts[2::2], strict=True))
