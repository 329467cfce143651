"""Event files are decoded here by another reading of the format, and by TensorBoard if present."""

import math
import struct
from pathlib import Path

import pytest

from luyen.telemetry.sinks import EventFile, crc32c, masked_crc32c, record


def test_checksums_are_those_of_the_standard():
    # RFC 3720, B.4: 32 bytes of zeros, of ones, and ascending.
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    rotated = (0x8A9136AA >> 15 | 0x8A9136AA << 17) & 0xFFFFFFFF
    assert masked_crc32c(bytes(32)) == (rotated + 0xA282EAD8) % 2**32


def test_a_record_frames_its_payload():
    assert record(b"abc")[:8] == struct.pack("<Q", 3)
    assert record(b"abc")[12:15] == b"abc"
    assert len(record(b"abc")) == 8 + 4 + 3 + 4


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at


def fields(data: bytes) -> list[tuple[int, object]]:
    """(number, value) of a protobuf message: varints as int, the rest as bytes."""
    found: list[tuple[int, object]] = []
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        size = {1: 8, 5: 4}.get(tag & 7, 0)
        if tag & 7 == 0:
            value, at = varint(data, at)
            found.append((tag >> 3, value))
            continue
        if tag & 7 == 2:
            size, at = varint(data, at)
        found.append((tag >> 3, data[at : at + size]))
        at += size
    return found


def events(folder: Path) -> list[list[tuple[int, object]]]:
    """Every event of the one file in a folder, with all checksums verified."""
    [file] = folder.glob("events.out.tfevents.*")
    data, found = file.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        payload = data[12 : 12 + length]
        assert data[8:12] == struct.pack("<I", masked_crc32c(data[:8]))
        assert data[12 + length : 16 + length] == struct.pack("<I", masked_crc32c(payload))
        found.append(fields(payload))
        data = data[16 + length :]
    return found


def scalars(event: list[tuple[int, object]]) -> dict[str, float]:
    [summary] = [value for number, value in event if number == 5]
    assert isinstance(summary, bytes)
    read: dict[str, float] = {}
    for _, body in fields(summary):
        assert isinstance(body, bytes)
        inner = dict(fields(body))
        assert isinstance(inner[1], bytes)
        assert isinstance(inner[2], bytes)
        read[inner[1].decode()] = struct.unpack("<f", inner[2])[0]
    return read


def test_scalars_come_back_as_single_floats(tmp_path: Path):
    file = EventFile(tmp_path, first_step=2)
    file.write(300, {"reward/mean": 0.1, "too/large": 1e300, "none": math.nan})
    file.write(2**40, {"loss": -2.5})
    file.close()
    version, session, first, second = events(tmp_path)
    assert (3, b"brain.Event:2") in version
    assert session[1:] == [(2, 2), (7, b"\x08\x01")], "a session that starts at step 2"
    assert dict(first)[2] == 300
    read = scalars(first)
    assert read["reward/mean"] == struct.unpack("<f", struct.pack("<f", 0.1))[0]
    assert read["too/large"] == math.inf
    assert math.isnan(read["none"])
    assert (dict(second)[2], scalars(second)) == (2**40, {"loss": -2.5})


def test_tensorboard_reads_the_file(tmp_path: Path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    file = EventFile(tmp_path)
    file.write(7, {"reward/mean": 0.5})
    file.close()
    [path] = tmp_path.iterdir()
    last = list(reader.EventFileLoader(str(path)).Load())[-1]
    assert (last.step, last.summary.value[0].tag) == (7, "reward/mean")
