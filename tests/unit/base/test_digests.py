"""Digest lines: chained, whole, cut back on resume, and refused when someone changed them."""

import json
from pathlib import Path

import pytest

from luyen.base.digests import (
    BEGINNING,
    SCHEMA,
    DigestFile,
    StepDigest,
    hash_parts,
    hash_value,
    link,
    read_digests,
)
from luyen.base.errors import UserError


def course(steps: int, *, other_from: int = 10**6) -> list[StepDigest]:
    """Digests of so many steps; from `other_from` on, those of another run."""
    chain, found = BEGINNING, []
    for step in range(1, steps + 1):
        stages = {"weights": hash_value([step, step >= other_from])}
        found.append(link(chain, step=step, stages=stages))
        chain = found[-1].chain
    return found


def written(path: Path, digests: list[StepDigest]) -> Path:
    file = DigestFile(path)
    for digest in digests:
        file.write(digest)
    file.sync()
    file.close()
    return path


def test_what_is_written_is_read_back(tmp_path: Path):
    digests = course(3)
    assert read_digests(written(tmp_path / "digests.jsonl", digests)) == digests
    assert digests[1].previous == digests[0].chain


def test_a_chain_remembers_every_step_before_it():
    one, other = course(4), course(4, other_from=2)
    assert one[0] == other[0]
    assert all(a.chain != b.chain for a, b in zip(one[1:], other[1:], strict=True))
    again = link(other[0].chain, step=2, stages=one[1].stages)
    assert again == one[1]
    assert link(BEGINNING, step=2, stages=one[1].stages).chain != one[1].chain
    assert link(one[0].chain, step=3, stages=one[1].stages).chain != one[1].chain


def test_a_resumed_run_drops_the_lines_it_will_write_again(tmp_path: Path):
    path = written(tmp_path / "digests.jsonl", course(4))
    DigestFile(path, first_step=3).close()
    assert read_digests(path) == course(2)
    DigestFile(path, first_step=0).close()
    assert read_digests(path) == []


def test_a_torn_last_line_is_left_out(tmp_path: Path):
    path = written(tmp_path / "digests.jsonl", course(3))
    path.write_bytes(path.read_bytes()[:-20])
    assert read_digests(path) == course(2)
    DigestFile(path, first_step=3).close()
    assert path.read_text().count("\n") == 2


@pytest.mark.parametrize("place", range(0, 200, 13))
def test_a_changed_line_is_refused_with_its_number(place: int, tmp_path: Path):
    path = written(tmp_path / "digests.jsonl", course(3))
    data = bytearray(path.read_bytes())
    start = data.index(b"\n") + 1
    data[start + place] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="line 2"):
        read_digests(path)
    with pytest.raises(UserError, match="line 2"):
        DigestFile(path, first_step=3)
    DigestFile(path, first_step=0).close()  # a run that begins anew needs none of it


def test_a_missing_file_and_a_later_layout_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="missing"):
        read_digests(tmp_path / "digests.jsonl")
    path = tmp_path / "later.jsonl"
    path.write_text(json.dumps({"schema": SCHEMA + 1}) + "\n")
    with pytest.raises(UserError, match="newer luyen"):
        read_digests(path)


def test_hashes_tell_apart_what_differs():
    assert hash_value(0.0) != hash_value(-0.0)
    assert hash_value([1]) != hash_value(["1"])
    assert hash_value(float("nan")) == hash_value(float("nan"))
    assert hash_value("half a pair: \ud83d") != hash_value("half a pair: \ud83e")
    assert hash_parts([b"", b"a"]) != hash_parts([b"a", b""])


def test_an_unknown_stage_is_ours_to_mend():
    with pytest.raises(AssertionError, match="unknown stages"):
        link(BEGINNING, step=1, stages={"mood": "good"})
