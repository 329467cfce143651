"""Mixtures with weights in whole runs: shares as metrics, exact resumption, every stage."""

import json
from pathlib import Path

import pytest

from luyen.config.check import check
from luyen.studio.evaluation.evaluator import prompts_of_run
from luyen.telemetry.metrics import read_metrics
from luyen.train.builders.setup import load_run_tokenizer
from luyen.train.start import run_training
from tests.runs import report_of, train

SUMS, PRODUCTS = "arithmetic://sum?digits=1&size=32", "arithmetic://product?digits=1&size=24"


def entries(**more: object) -> str:
    both = [
        {"path": SUMS, "weight": 3, "name": "sums", **more},
        {"path": PRODUCTS, "name": "other"},
    ]
    return f"data.train_files={json.dumps(both)}"


def test_entries_become_keys_of_their_own(tmp_path: Path):
    data = report_of(tmp_path, entries(max_samples=5)).config.data
    assert data.train_files == (SUMS, PRODUCTS)
    assert (data.train_weights, data.train_file_samples) == ((3.0, 1.0), (5, -1))
    assert data.train_names == ("sums", "other")


def test_a_path_of_an_entry_begins_at_the_file_that_names_it(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n')
    (tmp_path / "run.yaml").write_text(
        "data:\n  train_files:\n    - {path: rows.jsonl, weight: 2}\n"
    )
    assert check([tmp_path / "run.yaml"], []).config.data.train_files == (str(rows),)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("data.train_weights=[1]",), "1 values, and data.train_files has 2"),
        (("data.train_weights=[-1, 1]",), "negative"),
        (("data.train_weights=[0, 0]",), "all of them are 0"),
        (("data.train_file_samples=[0, 1]",), "no row of a file"),
        (("data.train_weights=[1e308, 1e308]",), "their sum is no number"),
        (("data.train_weights=[1e-320, 1e308]",), "a row in 1e15"),
        (("data.train_names=[a, a]",), "the same name"),
        (("data.train_names=[a, ' ']",), "a name is empty"),
        ((f"data.train_names=[a, {'b' * 300}]",), "longer than 200"),
        (("data.train_weights=[1, 1]", "data.sampler.name=sequential"), "has no use"),
    ],
)
def test_what_does_not_fit_the_files_is_refused(tmp_path: Path, words: tuple[str, ...], said: str):
    report = report_of(tmp_path, f"data.train_files=[{SUMS}, {PRODUCTS}]", *words)
    assert said in " ".join(problem.why for problem in report.problems)
    assert not report.is_sound


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"weight": 2}, "mapping with `path`"),
        ({"path": SUMS, "wieght": 2}, "no `wieght`"),
        (7, "mapping with `path`"),
    ],
)
def test_a_malformed_entry_is_refused(tmp_path: Path, entry: object, said: str):
    words = json.dumps([entry, {"path": SUMS}])
    report = report_of(tmp_path, f"data.train_files={words}")
    assert said in " ".join(problem.why for problem in report.problems)


def test_an_online_run_records_shares_and_resumes_exactly(tmp_path: Path):
    words = (entries(), "data.train_batch_size=8", "trainer.save_freq=2")
    words += ("trainer.experiment_name=mixed", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    whole = train(tmp_path / "whole", *words, "trainer.total_training_steps=4")
    train(tmp_path / "cut", *words, "trainer.total_training_steps=2")
    resumed = train(tmp_path / "cut", *words, "trainer.total_training_steps=4")
    assert resumed.metrics == whole.metrics
    shares = whole.course("data/share/sums")
    assert sum(shares) / len(shares) == pytest.approx(0.75, abs=2 / 32)
    assert whole.course("data/share/other") == [1 - share for share in shares]


def test_a_supervised_run_records_shares_and_resumes_exactly(tmp_path: Path):
    files = [
        {"path": f"{SUMS}&traces=1", "weight": 1},
        {"path": f"{PRODUCTS}&traces=1", "weight": 3},
    ]
    words = (f"data.train_files={json.dumps(files)}", "trainer.stage=sft", "trainer.save_freq=2")
    words += ("data.train_batch_size=8", "trainer.experiment_name=mixed")

    def lines(place: str, *steps: int) -> list[dict[str, float]]:
        for count in steps:
            more = f"trainer.total_training_steps={count}"
            report = report_of(tmp_path / place, *words, more)
            assert report.is_sound, report.problems
            run_training(report)
        found = read_metrics(tmp_path / place / "luyen" / "mixed" / "metrics.jsonl")
        return [line.timeless() for line in found]

    whole = lines("whole", 4)
    assert lines("cut", 2, 4) == whole
    shares = [
        line["data/share/sum_digits_1_size_32_traces_1"] for line in whole if "sft/nll" in line
    ]
    assert sum(shares) / len(shares) == pytest.approx(0.25, abs=2 / 32)


def test_a_prompt_of_two_files_counts_for_both_together(tmp_path: Path):
    words = (
        f"data.train_files=[{SUMS}, {SUMS}]",
        "data.train_names=[first, second]",
        "data.filter_duplicates=false",
        "data.train_batch_size=8",
    )
    ran = train(tmp_path, *words, "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    assert set(ran.course("data/share/first+second")) == {1.0}
    assert not any("data/share/second" in line for line in ran.metrics)


@pytest.mark.parametrize("weights", ["", "data.train_weights=[3, 1]"])
def test_an_evaluation_reads_every_row_whatever_the_mixture_took(tmp_path: Path, weights: str):
    words = (f"data.train_files=[{SUMS}, {PRODUCTS}]", "data.train_file_samples=[5, -1]")
    config = report_of(tmp_path, *words, *([weights] if weights else [])).config
    found = prompts_of_run(config, load_run_tokenizer(config), (SUMS,))
    assert len(found) == 32


def test_without_weights_nothing_is_recorded(tmp_path: Path):
    ran = train(tmp_path, f"data.train_files=[{SUMS}, {PRODUCTS}]")
    assert not any(name.startswith("data/share") for line in ran.metrics for name in line)
