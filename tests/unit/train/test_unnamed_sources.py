"""Rows without a data source, and what the summary says of validations."""

import warnings
from pathlib import Path

import pytest

from luyen.studio.evaluation.samples import samples_of
from luyen.telemetry.metrics import CATALOG
from luyen.train import session
from luyen.train.start import run_training
from luyen.train.validation import UNNAMED, validation_metrics
from tests.e2e.tiny import luyen
from tests.runs import report_of, train

ROW = '{"prompt": [{"role": "user", "content": "%d+1="}], "reward_model": {"ground_truth": "2"}}\n'


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(ROW % number for number in range(8)))
    return file


def test_rows_without_a_source_are_measured_together_and_under_known_names(
    rows: Path, tmp_path: Path
):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ran = train(tmp_path, f"data.train_files={rows}", f"data.val_files={rows}")
    names = {name for line in ran.metrics for name in line if name.startswith("val/")}
    assert "val/accuracy" in names
    assert [name for name in names if "//" in name] == []
    assert CATALOG.missing(names) == []


def test_a_source_that_is_missing_in_some_rows_has_a_name_beside_the_others():
    found = validation_metrics({"sums": [[1.0]], UNNAMED: [[0.0]]})
    shares = {name: value for name, value in found.items() if name.endswith("/accuracy")}
    assert shares == {"val/accuracy": 0.5, "val/sums/accuracy": 1.0, "val/unnamed/accuracy": 0.0}


def test_eval_has_no_empty_column():
    row = {"uid": "a", "data_source": "", "sample": 0, "answer": "2", "reward": 1.0, "fault": None}
    [sample] = samples_of([row], source="x")
    assert sample.data_source == "unnamed"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("trainer.val_before_train=false",), "at the end"),
        (("trainer.val_before_train=true",), " -> "),
    ],
)
def test_one_validation_is_no_change(
    words: tuple[str, ...],
    said: str,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(session, "plot_curves", lambda *_: [])
    report = report_of(tmp_path, f"data.val_files={rows}", *words)
    [change] = run_training(report).changes
    assert said in change.words()
    shown = luyen("timeline", tmp_path / "luyen" / "run").output
    assert shown.startswith("steps 1 to 2, "), "a validation belongs to the step before it"
    # The reward of the tiny run gives shares: it is no accuracy.
    assert change.label == "validation reward"
