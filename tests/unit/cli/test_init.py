"""`luyen init` writes a run that is sound, and overwrites nothing."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from luyen.base.errors import UserError
from luyen.cli.init import files, run_init
from luyen.cli.main import app


def test_the_rows_are_sums_and_no_validation_row_is_trained_on() -> None:
    train, val = (
        [json.loads(line) for line in files()[f"data/{name}.jsonl"].splitlines()]
        for name in ("train", "val")
    )
    assert (len(train), len(val)) == (64, 32)
    for row in (*train, *val):
        a, _, b = row["prompt"][0]["content"].removesuffix("=").partition("+")
        assert row["reward_model"]["ground_truth"] == str(int(a) + int(b))
    asked = [row["prompt"][0]["content"] for row in (*train, *val)]
    assert len(set(asked)) == len(asked)


def test_the_reward_has_verls_signature() -> None:
    names: dict = {}
    exec(files()["reward.py"], names)
    score = names["compute_score"]
    assert score("starter/sums", " 46", "46", {}) == 1.0
    assert score("starter/sums", "47", "46", extra_info=None) == 0.1
    assert score("starter/sums", "x", "46") == 0.0


def test_an_existing_file_is_kept_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("mine")
    with pytest.raises(UserError, match=r"reward\.py already"):
        run_init(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["reward.py"]


def test_the_starter_is_sound_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CliRunner().invoke(app, ["init", str(tmp_path / "a")])
    monkeypatch.chdir(tmp_path / "a")
    done = CliRunner().invoke(app, ["check", "config.yaml"])
    assert done.exit_code == 0
    assert "No problems in config.yaml" in done.output
