"""Instructions about form: lists, sections, titles, JSON, beginnings, endings, repetitions."""

import json
import re

from luyen.rewards.outcome import Unscorable
from luyen.rewards.rules.ifeval_instructions import divided, instruction

_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


@instruction("language:response_language")
def in_language(text: str, *, language: str) -> bool:  # noqa: ARG001
    """Nothing here can tell languages apart, and a guess would be a score."""
    raise Unscorable(f"the row asks for the language {language!r}, which is not detected here")


@instruction("detectable_content:number_placeholders")
def placeholders(text: str, *, num_placeholders: int) -> bool:
    """At least so many placeholders in square brackets, each on one line."""
    lines = (line[: line.rfind("]") + 1] for line in text.split("\n"))
    return sum(len(re.findall(r"\[[^\]]*\]", line)) for line in lines) >= num_placeholders


@instruction("detectable_content:postscript")
def postscript(text: str, *, postscript_marker: str) -> bool:
    """A postscript follows its marker; `P.S.` and `P.P.S` may have blanks inside."""
    spaced = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    marker = postscript_marker.strip()
    pattern = spaced.get(marker, re.escape(marker.lower()))
    return re.search(pattern, text.lower()) is not None


@instruction("detectable_format:number_bullet_lists")
def bullets(text: str, *, num_bullets: int) -> bool:
    """Exactly so many lines that begin with `*` (and not `**`) or `-`."""
    lines = [line.lstrip() for line in text.split("\n")]
    stars = sum(line[:1] == "*" and line[1:2] not in ("", "*") for line in lines)
    return stars + sum(line[:1] == "-" for line in lines) == num_bullets


@instruction("detectable_format:constrained_response")
def constrained(text: str) -> bool:
    """One of three fixed answers is in it."""
    return any(answer in text for answer in _ANSWERS)


@instruction("detectable_format:number_highlighted_sections")
def highlights(text: str, *, num_highlights: int) -> bool:
    """At least so many parts are marked like `*this*` or `**this**`, each on one line."""
    single = re.findall(r"\*([^\n*]*)\*", text)
    double = re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(part.strip()) for part in (*single, *double)) >= num_highlights


@instruction("detectable_format:multiple_sections")
def sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """At least so many sections, each behind its name and a number: `Section 1`."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


@instruction("detectable_format:json_format")
def is_json(text: str) -> bool:
    """All of it is JSON; a fence around it is allowed."""
    inner = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        inner = inner.removeprefix(fence)
    try:
        json.loads(inner.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


@instruction("detectable_format:title")
def title(text: str) -> bool:
    """A line holds a title in double angular brackets: `<<like this>>`."""
    for line in text.split("\n"):
        first, last = line.find("<<"), line.rfind(">>")
        if 0 <= first < last and line[first:last].strip("<> \t"):
            return True
    return False


@instruction("combination:two_responses")
def two_responses(text: str) -> bool:
    """Two different answers, divided by `******`."""
    parts = divided(text, "******")
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


@instruction("combination:repeat_prompt")
def repeats_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """It begins with the request, word for word, in any case."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


@instruction("startend:end_checker")
def ends_with(text: str, *, end_phrase: str) -> bool:
    """It ends with a phrase, in any case; quotation marks behind it do not count."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@instruction("startend:quotation")
def quoted(text: str) -> bool:
    """All of it stands in double quotation marks."""
    inner = text.strip()
    return len(inner) > 1 and inner[0] == inner[-1] == '"'
