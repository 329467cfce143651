"""Rows of a configuration as the studio previews them: what is learned, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.pipeline.policy_loading import read_config
from luyen.studio.actions.data_preview import preview
from tests.unit.web.server import serving

CONFIG = """
data: {train_files: FILE, max_prompt_length: 24, max_response_length: 8}
actor_rollout_ref: {model: {path: builtin://arithmetic}}
trainer: {stage: STAGE, total_training_steps: 1}
"""


def text_of(part: dict[str, Any], *, is_learned: bool) -> str:
    return "".join(one["text"] for one in part["stretches"] if one["is_learned"] is is_learned)


def rows_of(file: str, stage: str, folder: Path, limit: int) -> list[dict[str, Any]]:
    text = folder / "run.yaml"
    text.write_text(CONFIG.replace("FILE", file).replace("STAGE", stage))
    return preview(read_config([text], ()), "train", limit)["rows"]


def answers(folder: Path) -> Path:
    rows = [
        {"prompt": [{"role": "user", "content": question}],
         "completion": [{"role": "assistant", "content": answer}]}
        for question, answer in (("1+2=", "3"), ("4+5=", "9"), ("5+5=", "10"))
    ]  # fmt: skip
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def test_an_answer_is_learned_and_its_question_is_not(tmp_path: Path):
    file = answers(tmp_path)
    rows = rows_of(str(file), "sft", tmp_path, 2)
    assert [row["at"].rpartition(" ")[2] for row in rows] == ["1", "2"]
    [part] = rows[0]["parts"]
    assert text_of(part, is_learned=True) == "3<|im_end|>"
    assert "1+2=" in text_of(part, is_learned=False)
    # the digit and the end of the turn
    assert part["learned"] == 2
    with pytest.raises(UserError, match="of the kind `conversation`") as caught:
        rows_of(str(file), "preference", tmp_path, 2)
    assert caught.value.field == "data.train_files"


def test_a_prompt_that_is_too_long_says_so_and_its_tokens_are_not_learned(tmp_path: Path):
    rows = rows_of("arithmetic://sum?digits=2", "rl", tmp_path, 2)
    assert [row["parts"][0]["learned"] for row in rows] == [0, 0]
    # `97+7=` in 24 tokens with the template, `74+27=` in 25
    assert [len(row["problems"]) for row in rows] == [0, 1]
    assert "data.max_prompt_length is 24" in rows[1]["problems"][0]


def test_the_studio_gives_the_rows_and_the_findings_about_them(tmp_path: Path):
    text = CONFIG.replace("FILE", "arithmetic://sum?digits=1").replace("STAGE", "rl")
    with serving(tmp_path) as client:
        page = client.post("/data/preview", {"yaml": text, "limit": 3}).json
        assert len(page["rows"]) == 3
        assert all(str(one["key"]).startswith("data") for one in page["findings"])
        wrong = client.post("/data/preview", {"yaml": text.replace("rl", "preference"), "limit": 3})
        assert wrong.status == 422
        assert wrong.json["error"]["field"] == "data.train_files"


@pytest.mark.parametrize("body", [{"yaml": "a: [", "limit": 2}, {"yaml": "", "limit": 1000}])
def test_what_is_no_configuration_is_refused(tmp_path: Path, body: dict[str, Any]):
    with serving(tmp_path) as client:
        assert client.post("/data/preview", body).status == 422
    with serving(tmp_path, is_read_only=True) as client:
        assert client.post("/data/preview", body).status in (404, 405)
