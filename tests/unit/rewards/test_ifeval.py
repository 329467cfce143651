"""Verifiable instructions: each check against texts whose verdict follows from its definition."""

import json
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luyen.rewards.rules.ifeval import CHECKS, check_of, ifeval, sentences, variants
from luyen.rewards.rules.rule import Unscorable
from tests.unit.rewards.builders import answer, prompt

CASES = {
    "keywords:existence": [
        ({"keywords": ["tea", "Milk"]}, "Teapot and milk", True),
        ({"keywords": ["tea", "milk"]}, "tea only", False),
    ],
    "keywords:frequency": [
        ({"keyword": "to", "frequency": 2, "relation": "at least"}, "To be or not to be", True),
        ({"keyword": "to", "frequency": 3, "relation": "at least"}, "To be or not to be", False),
        ({"keyword": "to", "frequency": 2, "relation": "less than"}, "To be or not to be", False),
        ({"keyword": "to", "frequency": 3, "relation": "less than"}, "To be or not to be", True),
    ],
    "keywords:forbidden_words": [
        ({"forbidden_words": ["he"]}, "the helmet", True),
        ({"forbidden_words": ["he"]}, "So HE said", False),
        ({"forbidden_words": ["a.b"]}, "axb", True),
    ],
    "keywords:letter_frequency": [
        ({"letter": "e", "let_frequency": 3, "let_relation": "at least"}, "Eel, eye", True),
        ({"letter": "e", "let_frequency": 5, "let_relation": "at least"}, "Eel, eye", False),
        ({"letter": "z", "let_frequency": 1, "let_relation": "less than"}, "Eel", True),
    ],
    "length_constraints:number_words": [
        ({"num_words": 3, "relation": "at least"}, "one two-three", True),
        ({"num_words": 3, "relation": "less than"}, "one two-three", False),
        ({"num_words": 3.0, "relation": "less than"}, "one two", True),
    ],
    "length_constraints:number_sentences": [
        ({"num_sentences": 2, "relation": "at least"}, "One. Two!", True),
        ({"num_sentences": 2, "relation": "less than"}, "One costs 3.50 at most", True),
    ],
    "length_constraints:number_paragraphs": [
        ({"num_paragraphs": 2}, "one\n***\ntwo", True),
        ({"num_paragraphs": 2}, "*** one *** two ***", True),
        ({"num_paragraphs": 2}, "one\n\ntwo", False),
        ({"num_paragraphs": 3}, "one *** *** three", False),
    ],
    "length_constraints:nth_paragraph_first_word": [
        (
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
            'First.\n\n"Then, we go',
            True,
        ),
        ({"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "then"}, "A\n\nThen", False),
        ({"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "then"}, "A\n\nThen", False),
        ({"num_paragraphs": 1, "nth_paragraph": 2, "first_word": "then"}, "Then", False),
    ],
    "change_case:capital_word_frequency": [
        ({"capital_frequency": 2, "capital_relation": "at least"}, "The UN and NATO", True),
        ({"capital_frequency": 2, "capital_relation": "less than"}, "I am", True),
        ({"capital_frequency": 1, "capital_relation": "less than"}, "I am", False),
    ],
    "change_case:english_capital": [({}, "ALL 4 ONE!", True), ({}, "ALL FOR oNE", False)],
    "change_case:english_lowercase": [({}, "all 4 one!", True), ({}, "All for one", False)],
    "punctuation:no_comma": [({}, "one; two", True), ({}, "one, two", False)],
    "language:response_language": [],
    "detectable_content:number_placeholders": [
        ({"num_placeholders": 2}, "Dear [name], from [city]", True),
        ({"num_placeholders": 2}, "Dear [name\n], from [city]", False),
        ({"num_placeholders": 1}, "Dear [name", False),
    ],
    "detectable_content:postscript": [
        ({"postscript_marker": "P.S."}, "Bye.\n\np. s. Call me", True),
        ({"postscript_marker": "P.P.S"}, "P.P.S. Again", True),
        ({"postscript_marker": "P.P.S"}, "P.S. Once", False),
        ({"postscript_marker": "NB:"}, "nb: this", True),
    ],
    "detectable_format:number_bullet_lists": [
        ({"num_bullets": 3}, "Points:\n* one\n  - two\n- three", True),
        ({"num_bullets": 1}, "**Bold**\n* one", True),
        ({"num_bullets": 1}, "* one\n* two", False),
    ],
    "detectable_format:constrained_response": [
        ({}, "Well. My answer is maybe.", True),
        ({}, "my answer is yes", False),
    ],
    "detectable_format:number_highlighted_sections": [
        ({"num_highlights": 2}, "*one* and **two**", True),
        ({"num_highlights": 2}, "**one** and ** **", False),
        ({"num_highlights": 1}, "*one\n*", False),
    ],
    "detectable_format:multiple_sections": [
        ({"section_spliter": "Section", "num_sections": 2}, "Section 1\na\nSection 2\nb", True),
        ({"section_spliter": "Section", "num_sections": 2}, "Section 1\na\nSection two", False),
    ],
    "detectable_format:json_format": [
        ({}, '```json\n{"a": [1]}\n```', True),
        ({}, '{"a": 1}', True),
        ({}, 'Here: {"a": 1}', False),
        ({}, "[" * 100_000, False),
    ],
    "detectable_format:title": [
        ({}, "<<Spring>>\nIt rains", True),
        ({}, "<< >>", False),
        ({}, "<<Spring\n>>", False),
    ],
    "combination:two_responses": [
        ({}, "one\n******\ntwo", True),
        ({}, "one\n******\none", False),
        ({}, "one", False),
        ({}, "a ****** b ****** c", False),
    ],
    "combination:repeat_prompt": [
        ({"prompt_to_repeat": "Write a poem."}, "WRITE A POEM.\nRoses", True),
        ({"prompt_to_repeat": "Write a poem."}, "Roses", False),
    ],
    "startend:end_checker": [
        ({"end_phrase": "Any questions?"}, 'That is all. any questions?" \n', True),
        ({"end_phrase": "Any questions?"}, "Any questions? No.", False),
    ],
    "startend:quotation": [({}, ' "All of it." ', True), ({}, '"', False), ({}, '"a" b', False)],
}


def test_every_instruction_of_the_data_set_has_a_check_and_cases():
    assert set(CASES) == set(CHECKS)
    assert len(CASES) == 25


@pytest.mark.parametrize(
    ("name", "settings", "text", "follows"),
    [(name, *case) for name, cases in CASES.items() for case in cases],
)
def test_a_text_follows_an_instruction_or_not(name, settings, text, follows):
    assert check_of(name, settings)(text) is follows


def row(*instructions, **more):
    ids, settings = [name for name, _ in instructions], [given for _, given in instructions]
    return prompt(None, "ifeval", instruction_id_list=ids, kwargs=settings, **more)


NO_COMMA = ("punctuation:no_comma", {})
ENDS = ("startend:end_checker", {"end_phrase": "Bye.", "num_words": None})


@pytest.mark.parametrize(
    ("text", "hparams", "value"),
    [
        ("Well then. Bye.", {}, 1.0),
        ("Well, then. Bye.", {}, 0.0),
        ("Well, then. Bye.", {"credit": "share"}, 0.5),
        ("Sure, here it is:\nWell then. Bye.", {}, 0.0),
        ("Sure, here it is:\nWell then. Bye.", {"mode": "loose"}, 1.0),
        ("Well then. Bye.\nHope that helps", {"mode": "loose"}, 1.0),
        ("Well then. **Bye.**", {}, 0.0),
        ("Well then. **Bye.**", {"mode": "loose"}, 1.0),
        ("", {"mode": "loose"}, 0.0),
        ("", {"credit": "share"}, 0.0),
    ],
)
def test_strict_and_loose_over_all_instructions_and_by_share(text, hparams, value):
    assert ifeval(row(NO_COMMA, ENDS), answer(text), **hparams) == value


def test_loose_may_follow_each_instruction_in_another_variant():
    told = row(("change_case:english_lowercase", {}), ("startend:end_checker", {"end_phrase": "X"}))
    assert ifeval(told, answer("small words\nENDS IN X"), mode="loose") == 1.0
    assert ifeval(told, answer("small words\nENDS IN X"), mode="strict") == 0.0


def test_instructions_may_stand_in_the_ground_truth_as_text():
    truth = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [None]}
    for written in (truth, json.dumps(truth), truth | {"kwargs": "[{}]"}):
        assert ifeval(prompt(written), answer("a b")) == 1.0
    assert ifeval(prompt({"instruction_id_list": ["punctuation:no_comma"]}), answer("a,b")) == 0.0


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (prompt("12"), "no instruction_id_list"),
        (row(("punctuation:no_coma", {})), "did you mean `punctuation:no_comma`"),
        (row(("keywords:existence", {})), "lacks keywords"),
        (row(("punctuation:no_comma", {"num_words": 3})), "has no use for num_words"),
        (row(("keywords:frequency", {"keyword": "a", "frequency": 1, "relation": "=="})), "relat"),
        (row(("language:response_language", {"language": "de"})), "not detected here"),
        (row(), "0 instructions"),
        (prompt(None, instruction_id_list=["a"], kwargs=[{}, {}]), "1 instructions and 2"),
        (prompt(None, instruction_id_list=3), "no list"),
    ],
)
def test_a_row_that_cannot_be_checked_is_no_zero(asked, why):
    with pytest.raises(Unscorable, match=why):
        ifeval(asked, answer("a"))


@given(st.text(alphabet='ab,*\n "<>[]-.', max_size=60))
def test_loose_accepts_whatever_strict_accepts(text):
    told = row(NO_COMMA, ("detectable_format:title", {}), ("startend:quotation", {}))
    for credit in ("all", "share"):
        strict = ifeval(told, answer(text), mode="strict", credit=credit)
        assert ifeval(told, answer(text), mode="loose", credit=credit) >= strict
    assert len(variants(text)) == 8
    assert variants(text)[0] == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("one", 1),
        ("One. Two? Three!", 3),
        ("Mr. Li and Dr. Wu met, e.g. at 3.30 p.m. on Monday.", 1),
        ('She asked: "Why?" He left.', 2),
        ("Wait... what?!", 2),
        ("The end is Inc.", 1),
    ],
)
def test_sentences_are_counted(text, count):
    assert sentences(text) == count


@pytest.mark.parametrize("letter", ["<", "[", "*", " ", "\n", ".", "`", "***", "a. ", "P.S. "])
def test_no_flood_of_one_letter_takes_long(letter):
    text = letter * 100_000
    start = perf_counter()
    for name, cases in CASES.items():
        for settings, _, _ in cases[:1]:
            check_of(name, settings)(text)
    assert perf_counter() - start < 8
