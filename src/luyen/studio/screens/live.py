"""Changes of runs as server-sent events: files are followed, never read again.

Each run that is watched has one follower, whatever the number of browser tabs. It looks once a
second, and ends with the last tab. A tab that does not read is dropped.
"""

import asyncio
import json
import math
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from luyen.base.rundir import step_of
from luyen.base.system import read_at
from luyen.studio.metrics_file import open_records, parsed_line
from luyen.studio.screens.folder import KnownRun, Refusal, Row
from luyen.studio.screens.server_cache import Studio

_LOOK_S = 1.0
_PING_S = 15.0
_MOST_WAITING = 256
_MOST_LINES = 50
_MOST_READ = 2**24
Event = tuple[str, Any]


def json_bytes(value: Any) -> bytes:
    """Standard JSON; NaN and infinities become null.

    Example:
        >>> json_bytes({"a": float("nan")})
        b'{"a": null}'
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(_without_nan(value), ensure_ascii=False, default=str)
    return text.encode(errors="backslashreplace")


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return value


def event_bytes(name: str, value: Any) -> bytes:
    """An event as it is sent.

    Example:
        >>> event_bytes("ping", {})
        b'event: ping\\ndata: {}\\n\\n'
    """
    return b"event: %s\ndata: %s\n\n" % (name.encode(), json_bytes(value))


@final
class LineTail:
    """Lines that are appended to a file from now on; a replaced file is read from its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset = 0, 0
        self._at_end()

    def _at_end(self) -> None:
        with suppress(OSError):
            facts = os.stat(self._path)
            self._inode, self._offset = facts.st_ino, facts.st_size

    def read(self) -> list[dict[str, Any]]:
        """The new lines, at most the last 50."""
        try:
            handle = open_records(self._path)
        except OSError:
            return []
        try:
            facts = os.fstat(handle)
            if facts.st_ino != self._inode or facts.st_size < self._offset:
                is_first = self._inode == 0
                self._inode, self._offset = facts.st_ino, 0 if is_first else facts.st_size
            data = read_at(handle, min(facts.st_size - self._offset, _MOST_READ), self._offset)
        finally:
            os.close(handle)
        whole = data.rfind(b"\n") + 1
        self._offset += whole if whole or len(data) < _MOST_READ else len(data)
        return [parsed_line(line) for line in data[:whole].split(b"\n")[-_MOST_LINES:] if line]


@final
class RunFollower:
    """What changed of a run since it was last looked at."""

    def __init__(self, known: KnownRun) -> None:
        self._run = known.directory
        self._lines = LineTail(self._run.metrics)
        self._state = known.row["state"], known.row["step"]
        self._folders: dict[str, tuple[int, int] | None] = {}
        for split in ("rollouts", "validation"):
            self._folders[split] = self._newest(split)

    def look(self, row: Row | None) -> list[Event]:
        """The events since the last call; `row` is what the list shows of the run now."""
        if row is None:
            return [("state", {"state": "removed", "step": None})]
        found: list[Event] = []
        for line in self._lines.read():
            step = line.pop("step", None)
            line.pop("check", None)
            found.append(("step", {"step": step, "metrics": line}))
            measured = {n: v for n, v in line.items() if n.startswith("val/") or "/val_" in n}
            if measured:
                found.append(("validation", {"step": step, "metrics": measured}))
        for split, before in self._folders.items():
            now = self._newest(split)
            if now != before and now is not None:
                named = "train" if split == "rollouts" else split
                found.append(("rollouts", {"split": named, "step": now[1], "count": None}))
            self._folders[split] = now
        state = row["state"], row["step"]
        if state != self._state:
            found.append(("state", {"state": state[0], "step": state[1]}))
            self._state = state
        return found

    def _newest(self, split: str) -> tuple[int, int] | None:
        """Time and newest step of a folder; it is listed only when its time changed."""
        folder = self._run.root / split
        try:
            changed = os.stat(folder).st_mtime_ns
            before = self._folders.get(split)
            if before is not None and before[0] == changed:
                return before
            steps = [step for name in os.listdir(folder) if (step := step_of(name)) is not None]
        except OSError:
            return None
        return changed, max(steps, default=0)


@final
class LiveEvents:
    """The followers, and the tabs that listen."""

    def __init__(self, studio: Studio) -> None:
        self._studio = studio
        self._tabs: dict[str, set[asyncio.Queue[bytes | None]]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def of_run(self, run_id: str) -> AsyncIterator[bytes]:
        """Events of one run."""
        # In a thread: until the first scan is done it waits, and other requests must not.
        known = await asyncio.to_thread(self._studio.run, run_id)
        queue = self._enter(run_id)
        if run_id not in self._tasks:
            self._tasks[run_id] = asyncio.create_task(self._follow(run_id, known))
        return self._pieces(run_id, queue)

    async def of_folder(self) -> AsyncIterator[bytes]:
        """Rows of the list that changed."""
        queue = self._enter("")
        loop = asyncio.get_running_loop()
        if "" not in self._tasks:

            def tell(row: Row) -> None:
                loop.call_soon_threadsafe(self._tell, "", [("runs", row)])

            end = self._studio.folder.listen(tell)
            self._tasks[""] = asyncio.create_task(self._until_left(end))
        return self._pieces("", queue)

    def _enter(self, topic: str) -> "asyncio.Queue[bytes | None]":
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST_WAITING)
        self._tabs.setdefault(topic, set()).add(queue)
        return queue

    async def _pieces(
        self, topic: str, queue: "asyncio.Queue[bytes | None]"
    ) -> AsyncIterator[bytes]:
        try:
            yield event_bytes("ping", {})
            while True:
                try:
                    piece = await asyncio.wait_for(queue.get(), _PING_S)
                except TimeoutError:
                    piece = event_bytes("ping", {})
                if piece is None:
                    return
                yield piece
        except asyncio.CancelledError:
            return  # the server ends: the stream does too, and nothing went wrong
        finally:
            self._tabs.get(topic, set()).discard(queue)

    def _tell(self, topic: str, events: list[Event]) -> None:
        pieces = [event_bytes(name, value) for name, value in events]
        for queue in list(self._tabs.get(topic, ())):
            for piece in pieces:
                try:
                    queue.put_nowait(piece)
                except asyncio.QueueFull:
                    self._drop(topic, queue)
                    break

    def _drop(self, topic: str, queue: "asyncio.Queue[bytes | None]") -> None:
        self._tabs.get(topic, set()).discard(queue)
        queue.get_nowait()
        queue.put_nowait(None)

    async def _follow(self, run_id: str, known: KnownRun) -> None:
        follower = await asyncio.to_thread(RunFollower, known)
        try:
            while self._tabs.get(run_id):
                await asyncio.sleep(_LOOK_S)
                row = self._row(run_id)
                self._tell(run_id, await asyncio.to_thread(follower.look, row))
                if row is None:
                    for queue in list(self._tabs.get(run_id, ())):
                        self._drop(run_id, queue) if queue.full() else queue.put_nowait(None)
                    return
        finally:
            self._tasks.pop(run_id, None)

    def _row(self, run_id: str) -> Row | None:
        try:
            return self._studio.folder.get(run_id).row
        except Refusal:
            return None

    async def _until_left(self, end: Any) -> None:
        try:
            while self._tabs.get(""):
                await asyncio.sleep(_LOOK_S)
        finally:
            end()
            self._tasks.pop("", None)

    def close(self) -> None:
        """End every stream, so that the server can end."""
        for topic in list(self._tabs):
            for queue in list(self._tabs[topic]):
                self._drop(topic, queue) if queue.full() else queue.put_nowait(None)
