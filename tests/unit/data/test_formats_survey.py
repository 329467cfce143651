"""The survey of a file: lengths, repetitions, what is odd, what is wrong."""

from pathlib import Path
from typing import Any

from luyen.data.formats.layout import Lengths, Part, bars, figures_of
from luyen.data.formats.survey import Survey, survey
from luyen.data.render import Renderer
from luyen.data.tokenizer import load_tokenizer
from tests.unit.data.format_cases import ANSWER_CHANGES_PROMPT, TOOL, worn, write
from tests.unit.data.templates import assistant, renderer, user


def look(tmp_path: Path, *rows: Any, **options: Any) -> Survey:
    return survey(write(tmp_path / "rows.jsonl", list(rows)), **options)


def pair(chosen: str, rejected: str, **more: Any) -> dict[str, Any]:
    return {
        "prompt": [user("q")],
        "chosen": [assistant(chosen)],
        "rejected": [assistant(rejected)],
        **more,
    }


def part(length: int) -> Part:
    return Part(name="text", stretches=(), length=length, learned=length, notes=())


def test_repeated_rows_and_prompts_are_found_whatever_the_other_columns_say(tmp_path: Path):
    found = look(
        tmp_path, pair("a", "b", id=1), pair("a", "c", id=2), pair("a", "b", id=3), shown=0
    )
    assert (found.same_row.rows, found.same_row.examples) == (1, (("row 3", "row 1"),))
    assert found.same_prompt.rows == 2
    assert found.is_sound


def test_rows_of_several_files_are_told_apart(tmp_path: Path):
    write(tmp_path / "a.jsonl", [{"text": "x"}])
    write(tmp_path / "b.jsonl", [{"text": "x"}, {"text": 1}])
    found = survey(str(tmp_path))
    assert found.same_row.examples == (("b.jsonl row 1", "a.jsonl row 1"),)
    assert found.problems[0].at.file.endswith("b.jsonl")


def test_what_is_odd_is_said_with_its_first_row(tmp_path: Path):
    found = look(tmp_path, pair("a", "b"), pair("a", "a"), pair("long", ""), pair("[INST]", "b"))
    assert found.oddities == (
        "`chosen` and `rejected` say the same, so there is nothing to learn (row 2)",
        "an answer is empty (row 3)",
        "the template marker [INST] stands in the text (row 4)",
    )
    assert found.facts == (
        "the chosen answer has more characters than the rejected in 50% of pairs",
    )


def test_labels_of_one_kind_are_odd(tmp_path: Path):
    row = {"prompt": [user("q")], "completion": [assistant("a")], "label": True}
    assert look(tmp_path, row).oddities[-1].startswith("every label is true")
    assert look(tmp_path, row, {**row, "label": False}).facts == ("labels: 1 true, 1 false",)


def test_a_template_without_a_place_for_tools_is_odd(tmp_path: Path):
    row = {"messages": [user("q"), assistant("a")], "tools": [TOOL]}
    hidden = look(tmp_path, row, row, renderer=renderer("headers"))
    assert [what for what in hidden.oddities if "no place for tools" in what]
    assert look(tmp_path, row, renderer=renderer("chatml")).oddities == ()


def test_text_without_tokens_is_odd(tmp_path: Path):
    found = look(tmp_path, {"text": "a"}, {"text": "é"}, renderer=renderer("chatml"))
    assert found.oddities == ("the tokenizer has no token for some of the text (row 2)",)


def test_what_the_template_refuses_is_a_problem_of_the_row(tmp_path: Path):
    row = {"text": "a"}
    assert look(tmp_path, row, renderer=worn(ANSWER_CHANGES_PROMPT)).is_sound
    found = look(tmp_path, pair("long", "b"), renderer=worn(ANSWER_CHANGES_PROMPT))
    assert [problem.at.number for problem in found.problems] == [1]
    assert "another way once an answer follows" in found.problems[0].error.why
    assert (found.shown, found.measured, found.is_sound) == ((), 0, False)


def test_lengths_are_tokens_with_a_tokenizer_and_characters_without(tmp_path: Path):
    rows = [pair("a", "bb"), pair("ccc", "d")]
    found = look(tmp_path, *rows)
    assert found.unit == "characters"
    assert {name: (f.least, f.most) for name, f in found.figures.items()} == {
        "prompt": (1, 1),
        "chosen": (1, 3),
        "rejected": (1, 2),
        "whole": (3, 4),
    }
    tokens = look(tmp_path, *rows, renderer=Renderer(load_tokenizer("builtin://arithmetic")))
    assert tokens.unit == "tokens"
    assert tokens.figures["chosen"].most == 3 + 2  # the end of the turn and the line after it


def test_many_rows_are_measured_evenly():
    lengths = Lengths(most=10)
    for i in range(1000):
        if lengths.wants_next():
            lengths.add([part(i)])
    figures = lengths.figures()["whole"]
    assert 5 <= lengths.measured <= 10
    assert (figures.least, figures.most > 850) == (0, True)


def test_figures_and_bars_count_every_row():
    assert figures_of([7]) == figures_of([7, 7, 7])
    assert (figures_of(range(101)).median, figures_of(range(101)).nearly_all) == (50, 95)
    for lengths in ([5], [0, 9], [0, 10], list(range(0, 100_000, 7)), [3, 3, 900]):
        found = bars(lengths)
        assert sum(bar.rows for bar in found) == len(lengths)
        assert len(found) <= 10
        assert found[0].low <= min(lengths)
        assert found[-1].high >= max(lengths)
