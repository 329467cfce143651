"""Files that are written in place are those of the directory, and never those behind a link."""

import os
from pathlib import Path

import pytest

from luyen.base.digests import DigestFile
from luyen.base.errors import UserError
from luyen.base.files import open_lines, open_regular
from luyen.base.run_lock import claim, is_claimed, release
from luyen.telemetry.journal import JournalFile
from luyen.telemetry.sinks import JsonlSink
from luyen.telemetry.spans import SPANS
from luyen.telemetry.summary import note


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of the user outside of the run directory."""
    file = tmp_path / "precious"
    file.write_text("mine\n")
    return file


def planted(run: Path, name: str, victim: Path) -> Path:
    place = run / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(victim)
    return place


def test_a_linked_claim_cuts_no_file(tmp_path: Path, victim: Path):
    planted(tmp_path / "run", ".owner", victim)
    with pytest.raises(UserError, match="it is a link"):
        claim(tmp_path / "run")
    assert not is_claimed(tmp_path / "run")
    release(tmp_path / "run")
    assert victim.read_text() == "mine\n"


def test_a_linked_journal_cuts_no_file(tmp_path: Path, victim: Path):
    place = planted(tmp_path, "journal/step_000001.work.jsonl", victim)
    with pytest.raises(UserError, match="it is a link"):
        JournalFile(place, basis="x")
    assert victim.read_text() == "mine\n"


@pytest.mark.parametrize("make", [JsonlSink, DigestFile, open_lines])
def test_no_line_is_added_behind_a_link(tmp_path: Path, make):
    """One that leads to nothing yet: it would be made."""
    place = planted(tmp_path / "run", "lines.jsonl", tmp_path / "new")
    with pytest.raises((UserError, OSError), match="it is a link"):
        make(place)
    assert not (tmp_path / "new").exists()


def test_notes_and_spans_stay_inside(tmp_path: Path, victim: Path):
    planted(tmp_path / "run", "notes.jsonl", victim)
    note(tmp_path / "run", "something")
    planted(tmp_path / "run", f"events/here-{os.getpid()}.jsonl", victim)
    with pytest.raises(UserError, match="it is a link"):
        SPANS.open(tmp_path / "run" / "events", process="here")
    assert victim.read_text() == "mine\n"


def test_a_pipe_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):
        open_lines(tmp_path / "pipe")
    with pytest.raises(OSError, match="no file"):
        open_regular(tmp_path / "pipe", os.O_RDONLY)


def test_a_file_with_a_second_name_is_not_written(tmp_path: Path, victim: Path):
    (tmp_path / "run" / "journal").mkdir(parents=True)
    for name in (".owner", "journal/step_000001.work.jsonl", "lines.jsonl"):
        os.link(victim, tmp_path / "run" / name)
    with pytest.raises(UserError, match="hard link"):
        claim(tmp_path / "run")
    with pytest.raises(UserError, match="hard link"):
        JournalFile(tmp_path / "run/journal/step_000001.work.jsonl", basis="x")
    for flags in (os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_APPEND):
        with pytest.raises(OSError, match="hard link"):
            open_regular(tmp_path / "run/lines.jsonl", flags)
    assert victim.read_text() == "mine\n"


def test_a_run_whose_journal_is_a_folder_elsewhere_is_not_claimed(tmp_path: Path):
    """Its files would be removed by their names when the run goes on."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="`journal` is a link to a folder"):
        claim(tmp_path / "run")
    assert not (tmp_path / "run" / ".owner").exists()


def test_checkpoints_may_lie_on_another_disk(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    claim(tmp_path / "run")
    release(tmp_path / "run")


def test_a_file_is_emptied_where_that_is_asked_for(tmp_path: Path, victim: Path):
    os.close(open_regular(victim, os.O_WRONLY | os.O_TRUNC))
    assert victim.read_text() == ""
