"""What `luyen check` says of rows that training would refuse, and what it leaves unread."""

import json
from pathlib import Path

import pytest

from luyen.config.schema.run import RunConfig
from luyen.data import first_rows
from luyen.data.first_rows import first_row_error
from tests.e2e.tiny import luyen

PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}


def stage_of(name: str, **data: object) -> RunConfig:
    return RunConfig.model_validate({"trainer": {"stage": name}, "data": data})


def written(folder: Path, name: str, *rows: object) -> str:
    (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(folder / name)


def test_pairs_of_plain_text_are_refused_by_check(tmp_path: Path):
    rows = written(tmp_path, "pairs.jsonl", PAIR)
    words = (f"data.train_files={rows}", "trainer.stage=preference")
    refused = luyen("check", *words)
    assert (refused.exit_code, "error D21  data.train_files" in refused.output) == (1, True)
    assert "row 1: chosen = '2': plain text would have to skip the chat template" in refused.output
    assert "Fix: write [" in refused.output
    accepted = luyen("check", *words, "data.string_prompts=user")
    assert accepted.exit_code == 0
    assert f"the rows of {rows} are not read beyond the first" in accepted.output


@pytest.mark.parametrize("stage", ["rl", "sft", "preference"])
def test_what_is_no_row_is_an_error_of_every_stage(stage: str, tmp_path: Path):
    error = first_row_error(stage_of(stage), written(tmp_path, "rows.jsonl", 7))
    assert error is not None
    assert error.why
    assert error.fix


def test_only_the_first_row_is_read(tmp_path: Path):
    asked = {"prompt": [{"role": "user", "content": "1+1="}]}
    assert first_row_error(stage_of("rl"), written(tmp_path, "rows.jsonl", asked, 7)) is None


def test_files_that_are_read_whole_are_left_unread_beyond_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "rows.json").write_text(json.dumps([PAIR]))
    file, config = str(tmp_path / "rows.json"), stage_of("preference")
    assert first_row_error(config, file) is not None
    monkeypatch.setattr(first_rows, "_MOST_BYTES", 3)
    assert first_row_error(config, file) is None


def test_addresses_and_files_that_are_not_there_are_left_to_other_rules(tmp_path: Path):
    for address in (
        "hf://org/rows?split=train",
        "arithmetic://nothing",
        str(tmp_path / "no.jsonl"),
    ):
        assert first_row_error(stage_of("sft"), address) is None
