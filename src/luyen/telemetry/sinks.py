"""Sinks of metrics and of tables of rollouts: console, JSONL, TensorBoard, and remote ones.

Local sinks raise when they cannot write: a run that records nothing should not go on. Remote sinks
are created and called in a background thread (`BackgroundSink`), and import their packages there.
"""

import ctypes
import os
import queue
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, final, runtime_checkable

from luyen.base.errors import UserError
from luyen.base.files import append, open_lines, writing
from luyen.base.rundir import RunDirectory
from luyen.telemetry.display import Display
from luyen.telemetry.metrics import CATALOG, keep_before, metrics_line
from luyen.telemetry.remote_sinks import REMOTE, RunIdentity, missing_packages
from luyen.telemetry.rollout_tables import RolloutTable
from luyen.telemetry.spans import SPANS


class Sink(Protocol):
    """Receives the metrics of a run."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step; called once a step, in increasing order."""
        ...

    def close(self) -> None:
        """Finish; nothing more will come."""
        ...


@runtime_checkable
class RolloutSink(Sink, Protocol):
    """A sink that shows tables of rollouts, too."""

    def rollouts(self, table: RolloutTable) -> None:
        """Write a table of rollouts, before the metrics of its step."""
        ...


class SinkFailure(UserWarning):
    """A remote sink failed; the run goes on without it."""


@final
class BackgroundSink:
    """Creates and calls another sink in a thread of its own.

    A network that hangs never delays a step. The first failure becomes a warning, and the run goes
    on.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], RolloutSink],
        *,
        capacity: int = 1000,
        timeout_s: float = 30.0,
    ) -> None:
        """At most `capacity` calls are queued; `close` waits at most `timeout_s` for them."""
        self._name = name
        self._timeout_s = timeout_s
        self._calls: queue.Queue[Callable[[RolloutSink], None] | None] = queue.Queue(capacity)
        self._failure: str | None = None
        self._has_warned = False
        self._thread = threading.Thread(
            target=self._work, args=(make,), name=f"sink-{name}", daemon=True
        )
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics."""
        kept = dict(metrics)
        self._enqueue(lambda sink: sink.write(step, kept))

    def rollouts(self, table: RolloutTable) -> None:
        """Queue the table."""
        self._enqueue(lambda sink: sink.rollouts(table))

    def close(self) -> None:
        """Wait for the queued calls, up to the timeout."""
        deadline = time.monotonic() + self._timeout_s
        try:
            self._calls.put(None, timeout=self._timeout_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            self._failure = self._failure or "it does not answer"
        if self._thread.is_alive():
            self._failure = self._failure or f"it did not finish within {self._timeout_s:g} s"
        self._warn_of_failure()

    def _enqueue(self, call: Callable[[RolloutSink], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._failure = self._failure or "it is too slow: calls were dropped"
        self._warn_of_failure()

    def _warn_of_failure(self) -> None:
        """Warn in the thread of the run, where the user or a test sees it."""
        if self._failure is not None and not self._has_warned:
            self._has_warned = True
            message = f"sink {self._name}: {self._failure}; training goes on without it"
            warnings.warn(message, SinkFailure, stacklevel=4)

    def _work(self, make: Callable[[], RolloutSink]) -> None:
        sink: RolloutSink | None = None
        try:
            sink = make()
        except Exception as error:  # noqa: BLE001 - whatever a remote service raises
            self._failure = f"{type(error).__name__}: {error}"
        while (call := self._calls.get()) is not None:
            self._carry_out(call, sink)
        self._carry_out(lambda made: made.close(), sink)

    def _carry_out(self, call: Callable[[RolloutSink], None], sink: RolloutSink | None) -> None:
        try:
            if sink is not None:
                call(sink)
        except Exception as error:  # noqa: BLE001 - whatever a remote service raises
            self._failure = self._failure or f"{type(error).__name__}: {error}"


# TensorBoard's event files, written without TensorBoard: scalars and text.
#
# A file is a sequence of TFRecords: length, its checksum, the payload, its checksum; checksums are
# CRC-32C, masked as in TensorFlow. A payload is one protobuf `Event`, encoded here by hand since
# scalars and text need few of its fields.

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
    """CRC-32C, masked as in TFRecord so that data that contains its own checksum stays safe."""
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
    """A protobuf `Event`: time (1), step (2), and the given encoded field."""
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


_DT_STRING = 7
"""TensorFlow's number of the type of texts."""


def text(tag: str, content: str) -> bytes:
    """The `summary` field (5) of an event with one text, which TensorBoard shows as Markdown.

    The value has tag (1), tensor (8) and metadata (9) with the name of TensorBoard's text plugin;
    the tensor is of one dimension (`tensor_shape`, 2) and holds one string (`string_val`, 8).
    """
    shape = _field(2, _BYTES, _field(2, _BYTES, _field(1, _VARINT, _varint(1))))
    tensor = _field(1, _VARINT, _varint(_DT_STRING)) + shape + _field(8, _BYTES, content.encode())
    plugin = _field(1, _BYTES, _field(1, _BYTES, b"text"))
    entry = _field(1, _BYTES, tag.encode()) + _field(8, _BYTES, tensor) + _field(9, _BYTES, plugin)
    return _field(5, _BYTES, _field(1, _BYTES, entry))


@final
class EventFile:
    """One event file of one session, appended to at each step."""

    def __init__(self, folder: Path, *, first_step: int = 0) -> None:
        """The session begins at `first_step`: TensorBoard drops later steps of earlier sessions."""
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

    def write_text(self, step: int, tag: str, content: str) -> None:
        """Add a text in Markdown."""
        self._append(event(time.time(), step, text(tag, content)))

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    def _append(self, payload: bytes) -> None:
        append(self._file, record(payload))


@final
class ConsoleSink:
    """Shows each step on the display."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the step."""
        self._display.step(step, metrics)

    def close(self) -> None:
        """A no-op: the caller that opened the display closes it."""


@final
class JsonlSink:
    """`metrics.jsonl`: one object per step with sorted keys and a checksum, in one write."""

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        """Drops existing lines from `first_step` on: these steps will be repeated."""
        keep_before(path, first_step)
        with writing(path):
            self._file = open_lines(path)
        self._last = -1

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of a step."""
        assert step > self._last, f"step {step} was written after step {self._last}"
        own = {"step", "check"} & metrics.keys()
        assert not own, f"{own} are entries of the line, not of a metric"
        self._last = step
        append(self._file, metrics_line(step, metrics).encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@final
class TensorBoardSink:
    """Event files for TensorBoard."""

    def __init__(self, folder: Path, *, first_step: int = 0) -> None:
        self._file = EventFile(folder, first_step=first_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the scalars of a step."""
        self._file.write(step, metrics)

    def rollouts(self, table: RolloutTable) -> None:
        """Append the table as a text."""
        self._file.write_text(table.step, table.name, table.markdown())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@final
class MetricLog:
    """All sinks of a run as one: checks names against the catalog, adds `time/<span>`."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._rollout_sinks = [sink for sink in sinks if isinstance(sink, RolloutSink)]

    @property
    def shows_rollouts(self) -> bool:
        """Whether some sink shows tables of rollouts."""
        return bool(self._rollout_sinks)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step to every sink."""
        whole = SPANS.drain(step) | {name: float(value) for name, value in metrics.items()}
        CATALOG.warn_of_missing(whole)
        for sink in self._sinks:
            sink.write(step, whole)

    def rollouts(self, table: RolloutTable | None) -> None:
        """Send a table of rollouts to the sinks that show it, before the metrics of its step."""
        if table is None:
            return
        for sink in self._rollout_sinks:
            sink.rollouts(table)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def open_sinks(
    names: Sequence[str],
    *,
    directory: RunDirectory,
    identity: RunIdentity,
    display: Display,
    first_step: int = 0,
) -> MetricLog:
    """`metrics.jsonl`, and the sinks that `trainer.logger` adds.

    `first_step` is the first that this session will write.
    """
    local: dict[str, Callable[[], Sink]] = {
        "console": lambda: ConsoleSink(display),
        "tensorboard": lambda: TensorBoardSink(directory.tensorboard, first_step=first_step),
    }
    remote = [name for name in names if name not in (*local, "jsonl")]
    for name in remote:  # before any file is opened
        assert name in REMOTE, f"`{name}` passed the check of trainer.logger"
        lacking = missing_packages(name)
        if lacking is not None:
            raise UserError("trainer.logger", name, *lacking)
    sinks: list[Sink] = [JsonlSink(directory.metrics, first_step=first_step)]
    sinks += [local[name]() for name in names if name in local]
    sinks += [
        BackgroundSink(name, partial(REMOTE[name], identity, directory.root)) for name in remote
    ]
    return MetricLog(sinks)
