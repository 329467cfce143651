"""Verifiable instructions (IFEval, Zhou et al. 2023, arXiv:2311.07911): checked, not judged.

A row names its instructions as the data set does: `instruction_id_list` and `kwargs`, both
in its `extra_info` or both in its ground truth, there also as JSON.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

from luyen.base.errors import did_you_mean
from luyen.base.records import Prompt
from luyen.rewards.rules.rule import Answer, Unscorable, rule_rewards

# The registry of instructions by id, and how a row's settings reach a check.

Check: TypeAlias = Callable[..., bool]
"""`(text, *, settings) -> bool`: whether a text follows the instruction."""
Relation: TypeAlias = Literal["less than", "at least"]
CHECKS: dict[str, Check] = {}
"""Id of an instruction, as the data set writes it -> its check."""


def instruction(name: str) -> Callable[[Check], Check]:
    """Declare the check of an instruction."""

    def keep(check: Check) -> Check:
        assert name not in CHECKS, name
        CHECKS[name] = check
        return check

    return keep


def holds(found: int, relation: str, wanted: int) -> bool:
    """Whether a number is less than another, or at least it.

    Example:
        >>> holds(3, "at least", 3), holds(3, "less than", 3)
        (True, False)
    """
    if relation == "at least":
        return found >= wanted
    if relation == "less than":
        return found < wanted
    raise Unscorable(f"the row's relation {relation!r} is neither `at least` nor `less than`")


def divided(text: str, mark: str) -> list[str]:
    """The parts between marks; before the first and after the last there need be nothing.

    Example:
        >>> divided("*** one *** two", "***"), divided("one *** *** two", "***")
        (['one', 'two'], ['one', '', 'two'])
    """
    parts = [part.strip() for part in text.split(mark)]
    first = 0 if parts[0] else 1
    last = len(parts) if parts[-1] else len(parts) - 1
    return parts[first:last]


def check_of(name: str, settings: Mapping[str, Any]) -> Callable[[str], bool]:
    """The check of an instruction with the settings of a row, in which null means not given.

    Example:
        >>> check_of("keywords:existence", {"keywords": ["tea"], "num_words": None})("Green tea.")
        True
    """
    if name not in CHECKS:
        raise Unscorable(f"no check for the instruction {name!r}; {did_you_mean(name, CHECKS)}")
    check = CHECKS[name]
    given = {key: _plain(value) for key, value in settings.items() if value is not None}
    parameters = inspect.signature(check).parameters
    known = [key for key in parameters if parameters[key].kind is inspect.Parameter.KEYWORD_ONLY]
    lacking = [key for key in known if key not in given]
    strange = [key for key in given if key not in known]
    if lacking or strange:
        why = f"lacks {', '.join(lacking)}" if lacking else f"has no use for {', '.join(strange)}"
        raise Unscorable(f"the row's instruction {name!r} {why}")
    return lambda text: check(text, **given)


def _plain(value: Any) -> Any:
    """Tables read back from files hold whole numbers as floats."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value


# Format instructions: lists, sections, titles, JSON, beginnings, endings, repetitions.

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


# Word instructions: keywords and counts, letters, sentences, paragraphs, case, commas.

_WORD = re.compile(r"\w+")
_TOKEN = re.compile(r"\w+(?:[.'\u2019-]\w+)*")
_ABBREVIATION = re.compile(
    r"(?:\b(?:mr|mrs|ms|dr|prof|st|vs|etc|inc|ltd|co|jr|sr|no|fig|approx)|\b[a-z](?:\.[a-z])*)\.$",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(  # only where a run of points begins: a million are looked at once
    r"(?<![.!?\u2026])[.!?\u2026]++[\"')\]\u201d\u2019*_]*+(?=\s|\Z)"
)


@instruction("keywords:existence")
def has_keywords(text: str, *, keywords: list[str]) -> bool:
    """Every keyword occurs, in any case, also inside words."""
    return all(word.casefold() in text.casefold() for word in keywords)


@instruction("keywords:frequency")
def keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """A keyword occurs less than, or at least, so often."""
    found = text.casefold().count(keyword.strip().casefold())
    return holds(found, relation, frequency)


@instruction("keywords:forbidden_words")
def without_words(text: str, *, forbidden_words: list[str]) -> bool:
    """None of the words occurs as a whole word."""
    return not any(
        re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words
    )


@instruction("keywords:letter_frequency")
def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    """A letter, small or capital, occurs less than, or at least, so often."""
    if len(letter) != 1:
        raise Unscorable(f"the row's letter {letter!r} is not one letter")
    return holds(text.lower().count(letter.lower()), let_relation, let_frequency)


@instruction("length_constraints:number_words")
def number_of_words(text: str, *, num_words: int, relation: str) -> bool:
    """Less than, or at least, so many runs of letters and digits."""
    return holds(len(_WORD.findall(text)), relation, num_words)


@instruction("length_constraints:number_sentences")
def number_of_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    """Less than, or at least, so many sentences."""
    return holds(sentences(text), relation, num_sentences)


def sentences(text: str) -> int:
    """How many sentences a text has; a point in a number or an abbreviation ends none.

    Example:
        >>> sentences("Dr. Li paid 3.50 euros. Why? I do not know"), sentences("...")
        (3, 0)
    """
    count, begin, length = 0, 0, len(text.rstrip())
    for end in _SENTENCE_END.finditer(text):
        upto = text[max(begin, end.end() - 20) : end.end()]
        if _ABBREVIATION.search(upto) and end.end() < length:
            continue
        count += bool(_WORD.search(text, begin, end.end()))
        begin = end.end()
    return count + bool(_WORD.search(text, begin))


@instruction("length_constraints:number_paragraphs")
def number_of_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Exactly so many paragraphs, divided by `***`; none between two of these is empty."""
    parts = divided(text, "***")
    return all(parts) and len(parts) == num_paragraphs


@instruction("length_constraints:nth_paragraph_first_word")
def first_word_of_paragraph(
    text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """So many paragraphs, divided by empty lines, of which the n-th begins with a word."""
    parts = text.split("\n\n")
    if sum(bool(part.strip()) for part in parts) != num_paragraphs:
        return False
    if not 1 <= nth_paragraph <= len(parts) or not parts[nth_paragraph - 1].strip():
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'\"")
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.strip().lower()


@instruction("change_case:capital_word_frequency")
def capital_words(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    """Less than, or at least, so many words are written in capitals only."""
    found = sum(token.isupper() for token in _TOKEN.findall(text))
    return holds(found, capital_relation, capital_frequency)


@instruction("change_case:english_capital")
def all_capital(text: str) -> bool:
    """There is no small letter, and some capital. The language is not looked at."""
    return text.isupper()


@instruction("change_case:english_lowercase")
def all_small(text: str) -> bool:
    """There is no capital letter, and some small one. The language is not looked at."""
    return text.islower()


@instruction("punctuation:no_comma")
def no_comma(text: str) -> bool:
    """There is no comma."""
    return "," not in text


_IDS, _SETTINGS = "instruction_id_list", "kwargs"


@rule_rewards.register("ifeval", deterministic=True, wrong=0.0)
def ifeval(
    prompt: Prompt,
    answer: Answer,
    *,
    mode: Literal["strict", "loose"] = "strict",
    credit: Literal["all", "share"] = "all",
) -> float:
    """1 when the answer follows every instruction of the row, with `share` the part it follows.

    `loose` also accepts an answer that follows without its first line, its last line or its stars.
    """
    if mode not in ("strict", "loose"):
        raise Unscorable(f"mode {mode!r} is neither strict nor loose")
    if credit not in ("all", "share"):
        raise Unscorable(f"credit {credit!r} is neither all nor share")
    texts = variants(answer.text) if mode == "loose" else [answer.text]
    checks = [check_of(name, settings) for name, settings in instructions_of(prompt)]
    followed = [any(text.strip() and check(text) for text in texts) for check in checks]
    return sum(followed) / len(followed) if credit == "share" else float(all(followed))


def variants(text: str) -> list[str]:
    """An answer as it is, without its first line, its last, both; and each without its stars.

    Example:
        >>> variants("Sure:\\n*tea*")
        ['Sure:\\n*tea*', '*tea*', 'Sure:', '', 'Sure:\\ntea', 'tea', 'Sure:', '']
    """
    lines = text.split("\n")
    cut = [lines, lines[1:], lines[:-1], lines[1:-1]]
    plain = ["\n".join(some).strip() if some is not lines else text for some in cut]
    return [*plain, *(some.replace("*", "") for some in plain)]


def instructions_of(prompt: Prompt) -> list[tuple[str, Mapping[str, Any]]]:
    """The instructions of a row, each with its settings."""
    for place in (prompt.extra_info, _tree(prompt.ground_truth)):
        if not isinstance(place, Mapping) or _IDS not in place:
            continue
        row = cast(Mapping[str, Any], place)
        ids = _list(row[_IDS])
        settings = _list(row.get(_SETTINGS) or [{}] * len(ids))
        if not ids or len(ids) != len(settings):
            raise Unscorable(f"the row has {len(ids)} instructions and {len(settings)} {_SETTINGS}")
        return [(str(i), _mapping(s)) for i, s in zip(ids, settings, strict=True)]
    why = f"the row has no {_IDS} in its extra_info or ground truth"
    raise Unscorable(f"{why} (data source `{prompt.data_source}`)")


def _tree(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _list(value: Any) -> Sequence[Any]:
    found = _tree(value)
    if not isinstance(found, list | tuple):
        raise Unscorable(f"the row's instructions are no list: {str(value)[:100]!r}")
    return cast(Sequence[Any], found)


def _mapping(value: Any) -> Mapping[str, Any]:
    found = _tree(value) if value is not None else {}
    if not isinstance(found, Mapping):
        raise Unscorable(f"the row's settings of an instruction are {str(value)[:100]!r}")
    return cast(Mapping[str, Any], found)
