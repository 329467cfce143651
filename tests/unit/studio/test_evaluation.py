"""Files of samples, votes, and the report of two files compared without a model."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from luyen.base.errors import UserError
from luyen.cli.main import app
from luyen.studio.evaluation.request import EvalRequest
from luyen.studio.evaluation.samples import NEEDED, read_rows, samples_of, vote_of, write_rows


def row(uid: str, sample: int, reward: Any, **more: Any) -> dict[str, Any]:
    return {
        "uid": uid,
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{uid}?"}],
        "ground_truth": {"target": "2"},
        "sample": sample,
        "answer": "2" if reward == 1 else "3",
        "reward": reward,
        "score": {"name": "reward", "value": reward},
        "fault": None,
        **more,
    }


def file(path: Path, rewards: list[Any], **more: Any) -> Path:
    write_rows(path, [row(f"p{i}", 0, reward, **more) for i, reward in enumerate(rewards)])
    return path


def luyen(*words: str | Path):
    return CliRunner().invoke(app, ["eval", *map(str, words)])


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_rows_come_back_as_they_were_written(tmp_path: Path, ending: str):
    rows = [row("a", 0, 1.0), row("a", 1, None, fault="broke", score=None)]
    write_rows(tmp_path / f"samples.{ending}", rows)
    assert read_rows(tmp_path / f"samples.{ending}") == rows


@pytest.mark.parametrize(
    ("text", "vote"),
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2", "1"),
        ("<answer> Paris </answer> since 1920", "paris"),
        ("so 4 + 4\n#### 8", "8"),
        ("1,234 and then -5.0", "-5.0"),
        ("No  Idea", "no idea"),
        ("", ""),
    ],
)
def test_the_vote_is_the_final_answer(text: str, vote: str):
    assert vote_of(text) == vote


def test_a_reward_that_is_no_number_is_a_fault_and_never_a_zero():
    found = samples_of([row("a", 0, "nan"), row("b", 0, float("inf")), row("c", 0, 1)], source="x")
    assert [sample.reward for sample in found] == [None, None, 1.0]
    assert [sample.fault for sample in found] == ["reward: nan", "reward: inf", None]
    with pytest.raises(UserError, match="no number in x, row 1"):
        samples_of([row("a", 0, "high")], source="x")


def test_a_prompt_that_stands_in_two_rows_is_two_prompts():
    rows = [row("a", 0, 1), row("a", 1, 1), row("a", 0, 0), row("a", 1, 0)]
    assert [s.prompt for s in samples_of(rows, source="x")] == [("a", 0)] * 2 + [("a", 1)] * 2


def test_a_file_of_something_else_is_named():
    with pytest.raises(UserError, match="row 1 has no `uid`"):
        samples_of([{"question": "1+1="}], source="x")
    with pytest.raises(UserError, match="it holds no row"):
        samples_of([], source="x")


def test_two_files_are_compared_with_flips_faults_and_a_hint(tmp_path: Path):
    first = file(tmp_path / "a.jsonl", [1, 0, 0, 1, 1, None], decoding={"temperature": 1.0})
    second = file(tmp_path / "b.parquet", [1, 1, 0, 0, 1, 1], decoding={"temperature": 0.5})
    done = luyen("--compare", first, second)
    assert done.exit_code == 0, done.output
    assert "sums: 1 sample without a reward, left out" in done.output
    assert "left out: 1 prompt only in the second" in done.output
    assert "sampled differently: temperature 1.0 and 0.5" in done.output
    assert "1 better, 1 worse: p = 1 (McNemar's exact test)" in done.output
    assert "no significant difference with these 5 prompts; " in done.output
    assert "p1?   (0.00 -> 1.00)" in done.output
    assert "p3?   (1.00 -> 0.00)" in done.output


def test_a_clear_difference_is_told_and_the_json_lists_every_flip(tmp_path: Path):
    first = file(tmp_path / "a.jsonl", [0] * 12 + [1] * 8)
    second = file(tmp_path / "b.jsonl", [1] * 20)
    done = luyen("--compare", first, second, "--json", "--show", "1")
    page = json.loads(done.output)
    [difference] = page["comparison"]["differences"]
    assert difference["is_told"]
    assert difference["p"] == 2 / 2**12
    assert difference["accuracy"] == pytest.approx(0.6)
    assert 0 < difference["interval"]["low"] < 0.6 < difference["interval"]["high"] < 1
    assert [flip["uid"] for flip in page["comparison"]["gained"]] == [f"p{i}" for i in range(12)]
    assert len(page["first"]["rollouts"]) == 1
    assert "the second is better" in luyen("--compare", first, second).output


def test_files_without_a_common_prompt_and_files_that_are_not_there_are_refused(tmp_path: Path):
    first = file(tmp_path / "a.jsonl", [1])
    write_rows(tmp_path / "b.jsonl", [row("other", 0, 1)])
    told = luyen("--compare", first, tmp_path / "b.jsonl").exception
    assert isinstance(told, UserError)
    assert "no prompt is in both: 1 and 1" in str(told)
    told = luyen("--compare", first, tmp_path / "c.jsonl").exception
    assert isinstance(told, UserError)
    assert "no such file" in str(told)
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no more")
    told = luyen("--compare", first, tmp_path / "d.parquet").exception
    assert isinstance(told, UserError)
    assert "damaged" in str(told)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (EvalRequest(), "either a checkpoint is measured"),
        (EvalRequest(checkpoint="a", compare=(Path("a"), Path("b"))), "either a checkpoint"),
        (EvalRequest(compare=(Path("a"), Path("b")), against="c"), "without any model"),
        (EvalRequest(checkpoint="a", out=Path("nowhere/a.json")), "its folder is not there"),
        (EvalRequest(checkpoint="a", samples_out=Path("a.csv")), "names no format"),
    ],
)
def test_options_that_do_not_go_together_are_refused(request_: EvalRequest, why: str):
    with pytest.raises(UserError, match=why):
        request_.validate()


def test_a_k_beyond_the_samples_is_refused():
    assert EvalRequest().ks(most=9) == (1, 2, 4, 8)
    assert EvalRequest(k="8,1,1").ks(most=8) == (1, 8)
    for wrong in ("16", "0", "a", ""):
        with pytest.raises(UserError, match="--k"):
            EvalRequest(k=wrong).ks(most=8)


@pytest.mark.parametrize("value", [[], {}, "x", 10**400], ids=["list", "object", "text", "huge"])
def test_a_reward_that_is_no_number_is_refused_with_its_row(value: object):
    row: dict[str, Any] = dict.fromkeys(NEEDED, value)
    with pytest.raises(UserError, match="no number in here, row 1"):
        samples_of([row], source="here")


def test_a_sample_without_a_number_is_one_all_the_same():
    row: dict[str, Any] = dict.fromkeys(NEEDED)
    assert [sample.occurrence for sample in samples_of([row, row], source="here")] == [0, 1]


def test_few_prompts_detect_no_difference_rather_than_one_above_1(tmp_path: Path):
    """Of 2 prompts with one flip, the smallest visible difference would be above a whole share."""
    few = file(tmp_path / "a.jsonl", [1, 0]), file(tmp_path / "b.jsonl", [1, 1])
    said = luyen("--compare", *few).output
    assert "these detect none" in said
    many = [file(tmp_path / f"{i}.jsonl", [1, i] * 2 + [0] * 80) for i in (0, 1)]
    assert "these detect 0." in luyen("--compare", *many).output
