"""Whole commands at the same instant, and the streams and signals that a run outlives."""

import json
import os
import pty
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from luyen.base.digests import read_digests
from luyen.telemetry.metrics import read_metrics
from luyen.telemetry.summary import NAME
from tests.e2e.test_pipeline import write_pipeline
from tests.e2e.train_process import CLOSED, Trainings, wait_until
from tests.runs import TINY

NULL, FULL = "/dev/null", "/dev/full"
STEPS = 6


@pytest.fixture(scope="module")
def trainings() -> Iterator[Trainings]:
    with Trainings() as process:
        yield process


def words(folder: Path, *more: str) -> list[str]:
    given = [
        *TINY,
        f"trainer.default_local_dir={folder}",
        "trainer.logger=[console, jsonl]",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    ]
    return ["train", "recipes/quickstart.yaml", *given, *more]


def streams(folder: Path) -> list[str]:
    return [NULL, str(folder / "out"), str(folder / "err")]


def root_of(folder: Path) -> Path:
    return folder / "luyen" / "quickstart"


def notes(folder: Path) -> list[str]:
    file = root_of(folder) / NAME
    lines = file.read_text().splitlines() if file.is_file() else []
    return [json.loads(line)["note"] for line in lines]


def has_steps(root: Path, count: int) -> bool:
    file = root / "metrics.jsonl"
    return file.is_file() and len(file.read_bytes().splitlines()) >= count


def pair(trainings: Trainings, folder: Path, *command: str) -> tuple[list[int], str]:
    """How two processes end that are given the same command at the same instant, and their words.

    The first to end is the one that is refused; the other is then asked to end.
    """
    at = time.time() + 0.3
    outs = [folder / "one", folder / "two"]
    pids = [trainings.start(*command, streams=[NULL, str(o), str(o)], at=at) for o in outs]
    refusal = "another process is training it"
    try:
        wait_until(lambda: any(refusal in out.read_text() for out in outs if out.exists()))
    except AssertionError as error:
        raise AssertionError([out.read_text() for out in outs]) from error
    refused = next(i for i, o in enumerate(outs) if "another process" in o.read_text())
    codes = [trainings.wait(pids[refused])]
    assert (
        f"(process {pids[1 - refused]} on {os.uname().nodename} since " in outs[refused].read_text()
    )
    codes.append(trainings.wait(pids[1 - refused]))
    return codes, outs[1 - refused].read_text()


@pytest.mark.parametrize(
    "number", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 10))]
)
def test_of_two_whole_commands_one_trains(tmp_path: Path, trainings: Trainings, number: int):
    steps = "trainer.total_training_steps=12"  # so that it goes on while the other starts
    codes, said = pair(trainings, tmp_path, *words(tmp_path, steps, f"trainer.seed={number}"))
    assert codes == [1, 0], said
    root = root_of(tmp_path)
    assert [digest.step for digest in read_digests(root / "digests.jsonl")] == list(range(1, 13))
    assert json.loads((root / "resumptions.json").read_text())["resumptions"] == []
    assert (root / "checkpoints" / "step_000012").is_dir()


def test_of_two_pipelines_one_is_carried_out(tmp_path: Path, trainings: Trainings):
    file = write_pipeline(tmp_path)
    codes, said = pair(
        trainings, tmp_path, "train", str(file), f"trainer.default_local_dir={tmp_path / 'runs'}"
    )
    assert codes == [1, 0], said
    assert "Finished: all 2 stages" in said


LOST = {
    "output closed": ([NULL, CLOSED, NULL], ["standard output is lost"]),
    "error closed": ([NULL, NULL, CLOSED], ["standard error is lost"]),
    "all closed": ([CLOSED, CLOSED, CLOSED], ["standard output is lost", "standard error is lost"]),
    "output full": ([NULL, FULL, NULL], ["standard output is lost (No space left"]),
    "input closed": ([CLOSED, NULL, NULL], []),
}


@pytest.mark.parametrize("name", LOST)
def test_a_run_outlives_its_streams(tmp_path: Path, trainings: Trainings, name: str):
    given, said = LOST[name]
    assert trainings.run(*words(tmp_path), streams=given) == 0
    assert len(read_metrics(root_of(tmp_path) / "metrics.jsonl")) == STEPS
    assert (root_of(tmp_path) / "checkpoints" / f"step_{STEPS:06d}").is_dir()
    found = notes(tmp_path)
    assert len(found) == len(said)
    assert all(note.startswith(start) for note, start in zip(found, said, strict=True))


def test_a_run_outlives_the_reader_of_its_pipe(tmp_path: Path, trainings: Trainings):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    pid = trainings.start(*words(tmp_path), streams=[NULL, str(pipe), NULL])
    with pipe.open("rb") as reader:
        reader.readline()
    assert trainings.wait(pid) == 0
    assert len(read_metrics(root_of(tmp_path) / "metrics.jsonl")) == STEPS
    [note] = notes(tmp_path)
    assert note.startswith("standard output is lost (Broken pipe)")


def test_a_run_outlives_its_terminal(tmp_path: Path, trainings: Trainings):
    ours, theirs = pty.openpty()
    name = os.ttyname(theirs)
    pid = trainings.start(*words(tmp_path), streams=[NULL, name, name])
    wait_until(lambda: has_steps(root_of(tmp_path), 1))
    os.close(theirs)
    os.close(ours)
    assert trainings.wait(pid) == 0
    assert len(read_metrics(root_of(tmp_path) / "metrics.jsonl")) == STEPS
    assert any("Input/output error" in note for note in notes(tmp_path))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_a_run_with_a_checkpoint_and_its_code(
    tmp_path: Path, trainings: Trainings, number: signal.Signals, code: int
):
    many = "trainer.total_training_steps=100000"
    pid = trainings.start(*words(tmp_path, many), streams=streams(tmp_path))
    wait_until(lambda: has_steps(root_of(tmp_path), 1))
    os.kill(pid, number)
    assert trainings.wait(pid) == code, (tmp_path / "err").read_text()
    last = read_metrics(root_of(tmp_path) / "metrics.jsonl")[-1].step
    assert (root_of(tmp_path) / "checkpoints" / f"step_{last:06d}").is_dir()
    assert notes(tmp_path) == [f"interrupted by {number.name} after step {last} of 100000"]
    assert "Interrupted" in (tmp_path / "out").read_text()


def test_a_run_under_nohup_goes_on(tmp_path: Path, trainings: Trainings):
    how = {"streams": streams(tmp_path), "ignores": [signal.SIGHUP]}
    pid = trainings.start(*words(tmp_path), **how)
    wait_until(lambda: has_steps(root_of(tmp_path), 1))
    os.kill(pid, signal.SIGHUP)
    assert trainings.wait(pid) == 0
    assert notes(tmp_path) == []


def test_a_signal_before_the_first_step_says_so_and_leaves_no_run(
    tmp_path: Path, trainings: Trainings
):
    begun, plugin = tmp_path / "begun", tmp_path / "slow.py"
    plugin.write_text(
        f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(60)\n"
    )
    more = (f"trainer.plugins=[{plugin}]",)
    pid = trainings.start(*words(tmp_path, *more), streams=streams(tmp_path))
    wait_until(begun.exists)
    os.kill(pid, signal.SIGTERM)
    assert trainings.wait(pid) == 143
    assert "interrupted (SIGTERM)" in (tmp_path / "err").read_text()
    assert not root_of(tmp_path).exists()
