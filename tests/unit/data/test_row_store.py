"""Rows on disk: the same data as from memory, in memory that does not grow with the file."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.config.schema.data import DataConfig
from luyen.data import row_store
from luyen.data.build import TrainData, build_data
from luyen.data.formats.detect import Kind
from luyen.data.offline import OfflineData, build_offline_data
from luyen.data.row_store import Origins, RowWriter, StoredRows, changed, selected
from luyen.data.sources import load_dataset
from luyen.data.tokenizer import load_tokenizer
from luyen.telemetry.metrics import read_metrics
from tests.e2e.tiny import luyen

TOKENIZER = load_tokenizer("builtin://arithmetic")


def say(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def questions(tmp_path: Path) -> tuple[str, str]:
    """Two files with a duplicate, an empty prompt, one that is too long, and a marker."""
    first = [{"question": f"{i}+1=", "answer": str(i + 1), "level": i} for i in range(20)]
    more = [first[3], {"question": " ", "answer": "0"}, {"question": "1+" * 40, "answer": "40"}]
    second = [{"question": f"{i}+2= [INST]", "answer": str(i + 2)} for i in range(6)]
    return write(tmp_path / "a.jsonl", first + more), write(tmp_path / "b.jsonl", second)


def online(files: tuple[str, str], **more: Any) -> TrainData:
    data = DataConfig(train_files=files, val_files=files[:1], max_prompt_length=32, **more)
    return build_data(data, tokenizer=TOKENIZER, seed=5)


def offline(files: tuple[str, str], **more: Any) -> OfflineData[Any]:
    return build_offline_data(
        DataConfig(train_files=files, max_prompt_length=16, max_response_length=16, **more),
        kinds=(Kind.CONVERSATION,),
        tokenizer=TOKENIZER,
        seed=5,
    )


def facts(data: TrainData) -> Any:
    train = data.train
    return (
        *(list(train.prompts), list(train.origins), list(train.files), train.fingerprint),
        *(dict(train.counts), train.markers, data.num_leaked, data.names, data.notes()),
        data.sampler.take(0, 60),
        None if data.validation is None else list(data.validation.prompts),
    )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"filter_overlong_prompts": False, "truncation": "middle"},
        {"train_weights": (1, 3), "train_file_samples": (7, -1), "train_max_samples": 9},
    ],
)
def test_prompts_on_disk_are_those_in_memory(
    questions: tuple[str, str], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
):
    held = online(questions, **more)
    monkeypatch.setattr(row_store, "MOST_BYTES", 100)
    stored = online(questions, **more)
    assert isinstance(held.train.prompts, tuple)
    assert isinstance(stored.train.prompts, StoredRows)
    assert facts(stored) == facts(held)


def test_offline_rows_on_disk_are_those_in_memory(
    questions: tuple[str, str], monkeypatch: pytest.MonkeyPatch
):
    held = offline(questions)
    monkeypatch.setattr(row_store, "MOST_BYTES", 100)
    stored = offline(questions)
    assert isinstance(stored.train, StoredRows)
    assert tuple(stored.train) == held.train
    assert facts(stored.given) == facts(held.given)


def test_a_torn_file_is_named_before_a_wrong_row(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": 7}\n{"prompt": \n')
    with pytest.raises(UserError, match="line 2 is not valid JSON"):
        load_dataset([str(path)])


def test_rows_move_to_disk_when_they_pass_the_limit():
    writer = RowWriter[str](most_bytes=3)
    for row in ("a", "b", "c"):
        writer.append(row, num_bytes=1)
    assert writer.rows() == ("a", "b", "c")
    writer.append("d", num_bytes=1)
    rows = writer.rows()
    assert isinstance(rows, StoredRows)
    assert (len(writer), len(rows), rows[3], rows[-4]) == (4, 4, "d", "a")
    assert rows[1:3] == ("b", "c")
    with pytest.raises(IndexError):
        rows[4]


def test_rows_that_are_selected_and_changed_stay_on_disk():
    writer = RowWriter[str](most_bytes=0)
    for row in ("a", "b", "c"):
        writer.append(row, num_bytes=1)
    rows = writer.rows()
    turned = changed(selected(rows, [2, 0]), lambda place, row: f"{place}{row}")
    assert isinstance(turned, StoredRows)
    assert list(turned) == ["0c", "1a"]
    assert list(rows) == ["a", "b", "c"]


def test_origins_are_those_of_the_rows():
    origins = Origins()
    for file, number in (("a", 1), ("a", 3), ("b", 1)):
        origins.append(file, number)
    assert list(origins) == ["a row 1", "a row 3", "b row 1"]
    assert list(selected(origins, [2, 1])) == ["b row 1", "a row 3"]
    assert origins[1:] == ("a row 3", "b row 1")


def test_a_folder_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_store, "temporary_folder", lambda: str(tmp_path / "gone"))
    with pytest.raises(UserError, match="TMPDIR"):
        RowWriter[str](most_bytes=0).append("a", num_bytes=1)


def test_tmpdir_says_where_rows_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert row_store.temporary_folder() == str(tmp_path)


MEASURED = """
import sys
from luyen.base.system import peak_bytes
from luyen.config.schema.data import DataConfig
from luyen.data import row_store
from luyen.data.build import build_data
from luyen.data.tokenizer import load_tokenizer
row_store.MOST_BYTES = 2**20
def build(path):
    return build_data(DataConfig(train_files=(path,)), tokenizer=tokenizer)
tokenizer = load_tokenizer("builtin://arithmetic")
build(sys.argv[1])
before = peak_bytes()
data = build(sys.argv[2])
assert len(data.train.prompts) == int(sys.argv[3])
assert data.train.prompts[-1].extra_info["page"][0] == "x"
print((peak_bytes() - before) // 2**20)
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path):
    """96 MB of rows: objects of them would take more than that."""
    rows, page = 1200, "x" * 80_000
    for name, count in (("small.jsonl", 20), ("large.jsonl", rows)):
        with (tmp_path / name).open("w") as file:
            for i in range(count):
                row = {"question": f"{i}+1=", "answer": str(i + 1), "page": page}
                file.write(json.dumps(row) + "\n")
    files = [str(tmp_path / name) for name in ("small.jsonl", "large.jsonl")]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *files, str(rows)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 24, f"{done.stdout.strip()} MiB more"


@pytest.mark.parametrize("stage", ["rl", "sft"])
def test_a_run_on_stored_rows_has_the_digests_of_one_in_memory(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def digests(name: str) -> tuple[str, list[Any]]:
        words = (
            *("data.train_files=[arithmetic://sum?size=40&digits=1&traces=1]", "trainer.seed=3"),
            *(f"trainer.stage={stage}", "data.train_batch_size=4", "data.max_response_length=8"),
            *("actor_rollout_ref.model.path=builtin://arithmetic", "trainer.project_name=p"),
            *(f"trainer.experiment_name={name}", f"trainer.default_local_dir={tmp_path}"),
            *("trainer.total_training_steps=2", "data.val_files=[]"),
            *("trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.logger=[console]"),
        )
        if stage == "rl":
            words = tuple(word.replace("&traces=1", "") for word in words)
            words += (
                "actor_rollout_ref.rollout.n=2",
                "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            )
        done = luyen("train", *words)
        assert done.exit_code == 0, done.output
        run = tmp_path / "p" / name
        key = {"rl": "reward/mean", "sft": "sft/nll"}[stage]
        measured = [line.values.get(key) for line in read_metrics(run / "metrics.jsonl")]
        return (run / "digests.jsonl").read_text(), measured

    held = digests("held")
    monkeypatch.setattr(row_store, "MOST_BYTES", 100)
    assert digests("stored") == held
