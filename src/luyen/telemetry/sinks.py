"""The places metrics go, and the only door for wandb, mlflow and trackio.

Local sinks raise when they cannot write: a run that records nothing should not go on. Remote ones
are made and called in the background (`BackgroundSink`), and import their packages only there.
"""

import ctypes
import importlib.util
import os
import queue
import re
import socket
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final

from luyen.base.errors import UserError
from luyen.base.files import append, open_lines, writing
from luyen.base.rundir import RunDirectory
from luyen.base.secrets import masked_words
from luyen.telemetry.display import Display
from luyen.telemetry.metrics import CATALOG, keep_before, metrics_line
from luyen.telemetry.spans import SPANS

# A sink that may fail or be slow, kept away from training.
#
# A thread of its own makes the sink and carries out every call, so a network that hangs never
# holds a step up. Whatever goes wrong is told once, as a warning, and the run goes on.


class Sink(Protocol):
    """Where metrics go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep what a step measured; called once a step, with steps that rise."""
        ...

    def artifact(self, path: Path) -> None:
        """Keep a finished file of the run, where files are kept elsewhere than in its folder."""
        ...

    def close(self) -> None:
        """Finish; nothing more will come."""
        ...


class SinkFailure(UserWarning):
    """A sink could not keep something; the run goes on without it."""


@final
class BackgroundSink:
    """Calls another sink from a thread; failures become one warning."""

    def __init__(
        self, name: str, make: Callable[[], Sink], *, capacity: int = 1000, patience_s: float = 30.0
    ) -> None:
        """`capacity` calls may wait; `close` waits at most `patience_s` for them."""
        self._name = name
        self._patience_s = patience_s
        self._calls: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(capacity)
        self._failure: str | None = None
        self._told = False
        self._thread = threading.Thread(
            target=self._work, args=(make,), name=f"sink-{name}", daemon=True
        )
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the metrics over."""
        kept = dict(metrics)
        self._hand_over(lambda sink: sink.write(step, kept))

    def artifact(self, path: Path) -> None:
        """Hand the file over."""
        self._hand_over(lambda sink: sink.artifact(path))

    def close(self) -> None:
        """Wait for what was handed over, as long as patience lasts."""
        deadline = time.monotonic() + self._patience_s
        try:
            self._calls.put(None, timeout=self._patience_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            self._failure = self._failure or "it does not answer"
        if self._thread.is_alive():
            self._failure = self._failure or f"it did not finish within {self._patience_s:g} s"
        self._tell()

    def _hand_over(self, call: Callable[[Sink], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._failure = self._failure or "it is too slow: calls were dropped"
        self._tell()

    def _tell(self) -> None:
        """Warn in the thread of the run, where a person or a test will see it."""
        if self._failure is not None and not self._told:
            self._told = True
            said = f"sink {self._name}: {self._failure}; training goes on without it"
            warnings.warn(said, SinkFailure, stacklevel=4)

    def _work(self, make: Callable[[], Sink]) -> None:
        sink: Sink | None = None
        try:
            sink = make()
        except Exception as error:  # noqa: BLE001 - whatever a remote service raises
            self._failure = f"{type(error).__name__}: {error}"
        while (call := self._calls.get()) is not None:
            self._carry_out(call, sink)
        self._carry_out(lambda made: made.close(), sink)

    def _carry_out(self, call: Callable[[Sink], None], sink: Sink | None) -> None:
        try:
            if sink is not None:
                call(sink)
        except Exception as error:  # noqa: BLE001 - whatever a remote service raises
            self._failure = self._failure or f"{type(error).__name__}: {error}"


# TensorBoard's event files, written without TensorBoard.
#
# A file is a row of TFRecords: length, its checksum, the payload, its checksum; checksums are
# CRC-32C, masked as TensorFlow does. A payload is one protobuf `Event`, encoded here by hand
# since scalars need only five of its fields.

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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """How a run is called where other runs are.

    Example:
        >>> RunIdentity(run_id="20250101-000000-abc123", project="luyen", experiment="sums",
        ...             config={"trainer": {"seed": 0}}).experiment
        'sums'
    """

    run_id: str
    """Unique name; a resumed run has the same."""
    project: str
    """Runs that belong together."""
    experiment: str
    """Name for people."""
    config: Mapping[str, Any]
    """The configuration, without what is secret in it: remote loggers get it."""


@final
class ConsoleSink:
    """Shows each step on the display."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the step."""
        self._display.step(step, metrics)

    def artifact(self, path: Path) -> None:
        """A display keeps no files."""

    def close(self) -> None:
        """The display is closed by whoever opened it."""


@final
class JsonlSink:
    """`metrics.jsonl`: one object a step with sorted keys and a checksum, in one write."""

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        """Steps from `first_step` on will be measured again: their lines are dropped."""
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

    def artifact(self, path: Path) -> None:
        """The run directory holds the file already."""

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

    def artifact(self, path: Path) -> None:
        """The run directory holds the file already."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@final
class WandbSink:
    """A run on Weights & Biases."""

    def __init__(self, who: RunIdentity, folder: Path) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        sys.argv = masked_words(sys.argv)  # it reads and sends the command line by itself
        self._run = wandb.init(
            project=who.project,
            name=who.experiment,
            id=who.run_id,
            resume="allow",
            config=dict(who.config),
            dir=str(folder),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the step."""
        self._run.log(dict(metrics), step=step)

    def artifact(self, path: Path) -> None:
        """Upload the file."""
        self._run.save(str(path), base_path=str(path.parent), policy="now")

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


@final
class MlflowSink:
    """A run on an MLflow server, or in the store that MLFLOW_TRACKING_URI names."""

    def __init__(self, who: RunIdentity, folder: Path) -> None:  # noqa: ARG002 - one signature
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        self._metric = Metric
        self._client = MlflowClient()
        found = self._client.get_experiment_by_name(who.project)
        where = found.experiment_id if found else self._client.create_experiment(who.project)
        earlier = self._client.search_runs([where], f"tags.`luyen.run_id` = '{who.run_id}'")
        if earlier:
            self._id = earlier[0].info.run_id
            return
        tags = {"luyen.run_id": who.run_id, "mlflow.runName": who.experiment}
        self._id = self._client.create_run(where, tags=tags).info.run_id
        params = [Param(name, str(value)[:500]) for name, value in _leaves(who.config)]
        for start in range(0, len(params), 100):  # the most that one request may carry
            self._client.log_batch(self._id, params=params[start : start + 100])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the step; characters that MLflow refuses in a name become `_`."""
        now = int(time.time() * 1000)
        named = {re.sub(r"[^\w./: -]", "_", name): value for name, value in metrics.items()}
        rows = [self._metric(name, value, now, step) for name, value in named.items()]
        self._client.log_batch(self._id, metrics=rows)

    def artifact(self, path: Path) -> None:
        """Upload the file."""
        self._client.log_artifact(self._id, str(path))

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


def _leaves(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


@final
class TrackioSink:
    """A run in trackio's local store."""

    def __init__(self, who: RunIdentity, folder: Path) -> None:  # noqa: ARG002 - one signature
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(
            project=who.project,
            name=f"{who.experiment}-{who.run_id}",
            config=dict(who.config),
            resume="allow",
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the step."""
        self._run.log(dict(metrics), step=step)

    def artifact(self, path: Path) -> None:
        """Trackio keeps numbers; the run directory holds the file."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


REMOTE: dict[str, Callable[[RunIdentity, Path], Sink]] = {
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "trackio": TrackioSink,
}
"""Sinks that need a package of their own."""


@final
class MetricLog:
    """All sinks of a run as one: checks names against the catalog, adds the times of the step."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send what a step measured to every sink."""
        whole = SPANS.drain(step) | {name: float(value) for name, value in metrics.items()}
        CATALOG.warn_of_missing(whole)
        for sink in self._sinks:
            sink.write(step, whole)

    def artifact(self, path: Path) -> None:
        """Send a finished file to the sinks that keep files."""
        for sink in self._sinks:
            sink.artifact(path)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def open_sinks(
    names: Sequence[str],
    *,
    directory: RunDirectory,
    who: RunIdentity,
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
        if importlib.util.find_spec(name) is None:
            why = f"the package {name} is not installed"
            raise UserError("trainer.logger", name, why, f"pip install {name}, or drop it")
    sinks: list[Sink] = [JsonlSink(directory.metrics, first_step=first_step)]
    sinks += [local[name]() for name in names if name in local]
    sinks += [BackgroundSink(name, partial(REMOTE[name], who, directory.root)) for name in remote]
    return MetricLog(sinks)
