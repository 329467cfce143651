"""Instructions about words: which and how many, letters, sentences, paragraphs, case, commas."""

import re

from luyen.rewards.outcome import Unscorable
from luyen.rewards.rules.ifeval_instructions import divided, holds, instruction

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
