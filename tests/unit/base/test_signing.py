"""A page is known to be this user's by a key that no other user has."""

import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from luyen.base.digests import VARIABLE, NoKey, key_file, signed, unsigned


@pytest.fixture(autouse=True)
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "folder" / "key"
    monkeypatch.setenv(VARIABLE, str(place))
    return place


def test_what_was_signed_is_known_and_what_was_changed_is_not(key: Path):
    page = signed({"a": 1, "b": {"c": "d"}})
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert unsigned(page) == {"a": 1, "b": {"c": "d"}}
    for changed in ({**page, "a": 2}, {**page, "more": 1}, {**page, "hmac": "0" * 64}):
        with pytest.raises(NoKey, match="not that of what it holds"):
            unsigned(changed)


def test_another_key_and_no_key_are_told_apart(key: Path):
    page = signed({"a": 1})
    key.unlink()
    with pytest.raises(NoKey, match="has no key here"):
        unsigned(page)
    signed({})
    with pytest.raises(NoKey, match="signed with another key"):
        unsigned(page)


def test_a_key_that_others_can_read_or_that_is_none_is_not_used(key: Path):
    signed({})
    key.chmod(0o644)
    with pytest.raises(NoKey, match="open to other users"):
        signed({})
    key.chmod(0o600)
    key.write_text("")
    with pytest.raises(NoKey, match="holds no key"):
        signed({})


def test_where_no_key_can_be_made_the_reason_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "/proc/nowhere/key")
    with pytest.raises(NoKey, match="cannot be made"):
        signed({})


def test_the_key_lies_in_the_folder_of_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert key_file() == tmp_path / "luyen" / "run_key"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert key_file() == tmp_path / ".config" / "luyen" / "run_key"


def _sign(place: str, names: "multiprocessing.Queue[str]") -> None:
    os.environ[VARIABLE] = place
    names.put(signed({})["key"])


def test_processes_that_make_the_key_at_once_have_the_same_one(key: Path):
    names: multiprocessing.Queue[str] = multiprocessing.Queue()
    workers = [multiprocessing.Process(target=_sign, args=(str(key), names)) for _ in range(8)]
    for worker in workers:
        worker.start()
    assert len({names.get() for _ in workers}) == 1
    for worker in workers:
        worker.join()
    assert [path.name for path in key.parent.iterdir()] == ["key"]
