"""TensorBoard's event files, written without TensorBoard.

A file is a row of TFRecords: length, its checksum, the payload, its checksum; checksums are
CRC-32C, masked as TensorFlow does. A payload is one protobuf `Event`, encoded here by hand since
scalars need only five of its fields.
"""

import ctypes
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import final

from luyen.base.files import append, writing
from luyen.base.owned import open_lines

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def _table() -> tuple[int, ...]:
    entries: list[int] = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        entries.append(value)
    return tuple(entries)


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum.

    Example:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """The checksum as TFRecord stores it, so that data holding its own checksum stays safe."""
    value = crc32c(data)
    return (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def record(payload: bytes) -> bytes:
    """One TFRecord."""
    length = struct.pack("<Q", len(payload))
    marks = struct.pack("<I", masked_crc32c(length)), struct.pack("<I", masked_crc32c(payload))
    return length + marks[0] + payload + marks[1]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, kind: int, body: bytes) -> bytes:
    size = _varint(len(body)) if kind == _BYTES else b""
    return _varint(number << 3 | kind) + size + body


def event(wall_time: float, step: int, *fields: bytes) -> bytes:
    """A protobuf `Event`: time (1), step (2), and one field that says what happened."""
    when = _field(1, _FIXED64, struct.pack("<d", wall_time))
    return when + _field(2, _VARINT, _varint(step)) + b"".join(fields)


def scalars(metrics: Mapping[str, float]) -> bytes:
    """The `summary` field (5) of an event: values (1) with tag (1) and simple_value (2)."""
    values = b""
    for tag, value in metrics.items():
        single = ctypes.c_float(value).value  # rounds; what is too large becomes an infinity
        entry = _field(1, _BYTES, tag.encode()) + _field(2, _FIXED32, struct.pack("<f", single))
        values += _field(1, _BYTES, entry)
    return _field(5, _BYTES, values)


@final
class EventFile:
    """One event file of one session, appended to at each step."""

    def __init__(self, folder: Path, *, first_step: int = 0) -> None:
        """A file from `first_step` on: the viewer forgets what an earlier session put there."""
        now = time.time()
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}.{first_step}"
        with writing(folder / name):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open_lines(folder / name)
        self._append(event(now, 0, _field(3, _BYTES, b"brain.Event:2")))
        started = _field(7, _BYTES, _field(1, _VARINT, _varint(1)))  # SessionLog.status = START
        self._append(event(now, first_step, started))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the scalars of a step."""
        self._append(event(time.time(), step, scalars(metrics)))

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    def _append(self, payload: bytes) -> None:
        append(self._file, record(payload))
