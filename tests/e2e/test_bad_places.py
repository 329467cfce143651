"""Places where no run can be, and run directories of a stranger: an error that names the file."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from luyen.base.digests import page_with_checksum, text_with_checksum
from luyen.base.rundir import RunDirectory
from tests.e2e.test_owners import has_steps, root_of, streams, words
from tests.e2e.tiny import luyen
from tests.e2e.train_process import Trainings

DEEP = "[" * 100_000 + "]" * 100_000
LONG = "x" * 300


@pytest.fixture(scope="module")
def trainings() -> Iterator[Trainings]:
    with Trainings() as process:
        yield process


def said(trainings: Trainings, folder: Path, *more: str) -> str:
    """What a run that is refused says."""
    out = folder / "said"
    out.mkdir(exist_ok=True)
    code = trainings.run(*words(folder / "runs", *more), streams=streams(out))
    text = (out / "out").read_text() + (out / "err").read_text()
    assert code == 1, text
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("trainer.default_local_dir=FOLDER/file/below", "is no folder"),
        ("trainer.default_local_dir=~no-such-user/runs", "there is no such user"),
        (f"trainer.default_local_dir=FOLDER/{LONG}", "longer than 200 bytes"),
        (f"trainer.experiment_name={LONG}", "longer than 200 bytes"),
        (f"trainer.project_name={LONG}", "longer than 200 bytes"),
        ("trainer.experiment_name=a\udcff", "it is no UTF-8"),
    ],
)
def test_check_and_train_refuse_a_place_that_cannot_be(tmp_path: Path, override: str, reason: str):
    (tmp_path / "file").touch()
    word = override.replace("FOLDER", str(tmp_path))
    for command in ("check", "train"):
        done = luyen(command, *words(tmp_path / "runs")[1:], word)
        text = f"{done.output}{done.exception}"
        assert done.exit_code == 1
        assert reason in text
        assert override.partition("=")[0] in text


@pytest.mark.parametrize("name", ["journal", "rollouts", "events"])
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path, trainings: Trainings, name: str):
    folder = tmp_path / "runs"
    assert trainings.run(*words(folder, "trainer.save_freq=1"), streams=streams(tmp_path)) == 0
    root = root_of(folder)
    shutil.rmtree(root / name)
    (root / name).touch()
    text = said(trainings, tmp_path, "trainer.total_training_steps=12")
    assert name in text
    assert "error: " in text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, trainings: Trainings) -> Path:
    """A run with every kind of file."""
    folder = tmp_path_factory.mktemp("run")
    assert trainings.run(*words(folder, "trainer.save_freq=3"), streams=streams(folder)) == 0
    assert has_steps(root_of(folder), 6)
    return root_of(folder)


def sealed(name: str) -> str:
    """The file of a stranger who knows how seals are made."""
    if name == "config.yaml":
        return text_with_checksum(f"trainer: {DEEP}\n")
    return '{"a": ' + DEEP + "}\n"


COMMANDS = {
    "runs": lambda run: ("runs", run.parent.parent),
    "doctor": lambda run: ("doctor", run),
    "report": lambda run: ("report", run),
    "diff": lambda run: ("diff", run, run),
    "timeline": lambda run: ("timeline", run),
    "artifacts": lambda run: ("artifacts", "list", run.parent.parent),
    "rebuild": lambda run: ("artifacts", "rebuild", run.parent.parent),
    "replay": lambda run: ("replay", run, "--step", "2"),
    "rescore": lambda run: ("rescore", run),
    "reproduce": lambda run: ("reproduce", run, "--steps", "1", "--into", run.parent / "again"),
    "eval": lambda run: ("eval", run),
    "export": lambda run: ("export", run, run.parent / "exported"),
}
FILES = (
    "manifest.json",
    "metrics.jsonl",
    "digests.jsonl",
    "config.yaml",
    "provenance.json",
    "resumptions.json",
    "artifacts.jsonl",
    "notes.jsonl",
    "checkpoints/step_000006/manifest.json",
    "checkpoints/step_000006/actor.json",
)
SLOW = {"replay", "rescore", "reproduce", "eval", "export"}
"""These go on to train or load where the file is not theirs; the two that all read are enough."""


@pytest.mark.parametrize("command", COMMANDS)
def test_no_depth_of_a_file_makes_a_traceback(tmp_path: Path, run: Path, command: str):
    for name in FILES[:1] + FILES[3:4] if command in SLOW else (*FILES, "events"):
        place = tmp_path / name.replace("/", "-") / "luyen" / "run"
        shutil.copytree(run, place)
        files = place.glob("events/*.jsonl") if name == "events" else [place / name]
        for file in files:
            file.write_text(sealed(name))
        done = luyen(*COMMANDS[command](place))
        assert done.exception is None or type(done.exception).__name__ in (
            "UserError",
            "SystemExit",
        ), (name, done.exception)
        if name == "manifest.json" and command not in ("artifacts", "rebuild"):
            assert "nested too deeply" in f"{done.output}{done.exception}"


def test_a_run_that_goes_on_names_the_file_that_is_too_deep(
    tmp_path: Path, run: Path, trainings: Trainings
):
    for name in ("manifest.json", "metrics.jsonl", "digests.jsonl", "resumptions.json"):
        place = tmp_path / name / "runs" / "luyen" / "quickstart"
        shutil.copytree(run, place)
        (place / name).write_text(sealed(name))
        assert name in said(trainings, tmp_path / name)


def test_a_sealed_page_that_is_deep_does_not_pass(tmp_path: Path):
    root = RunDirectory(tmp_path)
    root.manifest.write_text(
        page_with_checksum({"schema": 2, "run_id": "a"})[:-3] + f', "b": {DEEP}}}'
    )
    assert "nested too deeply" in luyen("doctor", tmp_path).output
