"""A journal keeps what was written, and takes nothing for done that is not."""

import errno
import os
import time
import warnings
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.telemetry.journal import DamagedJournal, JournalFile


def written(path: Path, *keys: str, basis: str = "b") -> None:
    file = JournalFile(path, basis=basis)
    for key in keys:
        file.append("rollout", key, {"said": f"of {key}"})
    file.close()


def found(path: Path, *keys: str, basis: str = "b") -> list[str | None]:
    file = JournalFile(path, basis=basis)
    records = [file.find("rollout", key) for key in keys]
    file.close()
    return [None if record is None else record["said"] for record in records]


def test_what_one_process_wrote_another_finds(tmp_path: Path):
    path = tmp_path / "journal" / "a.jsonl"
    written(path, "1", "2")
    assert found(path, "1", "2", "3") == ["of 1", "of 2", None]
    written(path, "3")
    assert found(path, "1", "3") == ["of 1", "of 3"]


def test_another_basis_begins_anew(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    written(path, "1")
    assert found(path, "1", basis="c") == [None]
    assert found(path, "1", basis="b") == [None]  # the file is now on the other basis


def test_another_kind_is_another_record(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    written(path, "1")
    file = JournalFile(path, basis="b")
    assert (len(file), file.find("scores", "1")) == (1, None)
    file.close()
    file.close()


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_end_is_work_that_was_not_done(tmp_path: Path, cut: int):
    path = tmp_path / "a.jsonl"
    written(path, "1", "2")
    os.truncate(path, path.stat().st_size - cut)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found(path, "1", "2") == ["of 1", None]
        written(path, "3")
        assert found(path, "1", "2", "3") == ["of 1", None, "of 3"]


def test_every_flipped_bit_loses_at_most_its_own_record(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    written(path, "1", "2")
    whole = path.read_bytes()
    truth = {"1": "of 1", "2": "of 2"}
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DamagedJournal)
            for key, said in zip(truth, found(path, *truth), strict=True):
                assert said in (None, truth[key]), (place, key, said)


def test_damage_in_the_middle_is_told(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    written(path, "1", "2")
    path.write_bytes(path.read_bytes().replace(b"of 1", b"of 7"))
    with pytest.warns(DamagedJournal, match="1 records are damaged; their work is done again"):
        assert found(path, "1", "2") == [None, "of 2"]


def test_a_full_disk_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = JournalFile(tmp_path / "a.jsonl", basis="b")

    def full(handle: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(UserError, match="No space left"):
        file.append("rollout", "1", {})
    monkeypatch.setattr(os, "write", lambda handle, data: 3)
    with pytest.raises(UserError, match=r"3 of [0-9]+ bytes"):
        file.append("rollout", "1", {})
    file.close()


def test_a_disk_that_breaks_later_is_told_at_the_next_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("luyen.telemetry.journal.GROUP_S", 0.0)
    monkeypatch.setattr(os, "fsync", broken)
    file = JournalFile(tmp_path / "a.jsonl", basis="b")
    file.append("rollout", "1", {})
    deadline = time.monotonic() + 10
    while file._failure is None and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.raises(UserError, match="Input/output error"):
        file.append("rollout", "1", {})
    with pytest.raises(UserError, match="Input/output error"):
        file.sync()
    file.close()


def test_records_are_forced_to_the_disk_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(handle), real(handle)))
    file = JournalFile(tmp_path / "a.jsonl", basis="b")
    for number in range(100):
        file.append("rollout", str(number), {})
    file.close()
    assert 1 <= len(synced) <= 3
