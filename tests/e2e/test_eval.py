"""Checkpoints measured and compared, with samples on disk."""

import json
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.base.files import read_lines
from luyen.studio.evaluation.samples import read_rows
from tests.e2e.tiny import luyen, random_model, train

pytest.importorskip("transformers")
BUILTIN = "builtin://arithmetic"
ROWS = "arithmetic://sum?digits=2&split=held-out&size=12"
SUMS = (BUILTIN, "--data", ROWS, "--reward", "numeric")
FAULTY = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if ground_truth.endswith("7"):
        raise ValueError("seven")
    return float(solution_str == ground_truth)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model(tmp_path_factory.mktemp("models") / "random")
    return train(model, tmp_path_factory.mktemp("runs"))


def test_a_model_without_a_run_is_measured_and_its_samples_kept(tmp_path: Path):
    place = tmp_path / "samples.jsonl"
    done = luyen("eval", *SUMS, "--samples", "4", "--k", "1,3", "--json", "--samples-out", place)
    assert done.exit_code == 0, done.output
    page = json.loads(done.stdout)
    rows = read_lines(place)
    assert len(rows) == 12 * 4
    assert rows[0]["score"]["parts"][0]["name"] == "numeric"
    assert {row["decoding"]["temperature"] for row in rows} == {1.0}
    [found] = page["summary"]
    names = [measure["name"] for measure in found["measures"]]
    assert names == ["accuracy", "reward", "pass@1", "pass@3", "maj@3"]
    mean = sum(row["reward"] for row in rows) / len(rows)
    assert found["measures"][0]["value"] == pytest.approx(mean)
    assert page["metrics"]["val/accuracy"] == pytest.approx(mean)
    assert any(row["answer"] != rows[0]["answer"] for row in rows[:4] + rows[4:8])


def test_a_checkpoint_against_another_uses_the_same_rows_and_draws(run: Path, tmp_path: Path):
    place = tmp_path / "samples.parquet"
    words = ("--samples", "2", "--samples-out", place, "--json")
    done = luyen("eval", *SUMS, "--against", run, *words)
    assert done.exit_code == 0, done.output
    page = json.loads(done.stdout)
    mine, other = read_rows(place), read_rows(tmp_path / "samples.against.parquet")
    assert [row["uid"] for row in mine] == [row["uid"] for row in other]
    assert mine[0]["decoding"] == other[0]["decoding"]
    assert page["first"]["checkpoint"].endswith("step_000001")
    assert page["second"]["checkpoint"] == BUILTIN
    [difference] = page["comparison"]["differences"]
    assert difference["first"] < difference["second"]
    assert difference["test"] == "sign"
    from_files = luyen("eval", "--compare", tmp_path / "samples.against.parquet", place, "--json")
    assert json.loads(from_files.stdout)["comparison"] == page["comparison"]


def test_a_policy_does_not_differ_from_itself(tmp_path: Path):
    done = luyen("eval", *SUMS, "--against", BUILTIN, "--samples", "2")
    assert done.exit_code == 0, done.output
    assert "+0.000" in done.output
    assert "no significant difference with these 12 prompts" in done.output
    assert "Gained" not in done.output


def test_a_runs_checkpoint_takes_rows_and_reward_from_another_file(run: Path, tmp_path: Path):
    (tmp_path / "reward.py").write_text(FAULTY)
    config = tmp_path / "other.yaml"
    config.write_text(
        f"data: {{val_files: '{ROWS}', max_response_length: 8}}\n"
        f"reward: {{custom_reward_function: {{path: {tmp_path / 'reward.py'}}}}}\n"
    )
    done = luyen("eval", run, "--config", config, "--json", "--show", "99")
    assert done.exit_code == 0, done.output
    page = json.loads(done.stdout)
    assert page["checkpoint"].endswith("step_000001")
    [found] = page["summary"]
    sevens = [row for row in page["rollouts"] if row["ground_truth"].endswith("7")]
    assert sevens
    assert {row["reward"] for row in sevens} == {None}
    assert all("seven" in row["fault"] for row in sevens)
    assert (found["faults"], found["prompts"]) == (len(sevens), 12 - len(sevens))


def test_a_reward_model_gives_no_answers(run: Path):
    told = luyen("eval", run, "trainer.stage=reward_model").exception
    assert isinstance(told, UserError)
    assert "which judges answers and gives none" in told.why


def test_a_rule_that_is_not_there_is_explained():
    told = luyen("eval", BUILTIN, "--data", ROWS, "--reward", "numerix").exception
    assert isinstance(told, UserError)
    assert "numeric" in told.fix
