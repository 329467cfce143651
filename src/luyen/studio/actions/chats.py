"""Chats with checkpoints and served models: a process for each side, which answers.

The studio itself loads no model. A chat ends when it is closed, when it was idle for long, and with
the studio, however that ends: its processes read a pipe from it.
"""

import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.rundir import step_of
from luyen.studio.actions.job_queue import checkpoint_of
from luyen.studio.screens.folder import KnownRun, Refusal, RunFolder
from luyen.studio.screens.live import json_bytes

_MOST_CHATS = 4
_IDLE_S = 900.0
_END_S = 5.0
_MOST_S = 600.0
"""Most seconds of one answer, with the loading of the policy before the first."""


def sources(folder: RunFolder) -> list[dict[str, Any]]:
    """The checkpoints of the runs, the newest run first and its last step first.

    `tools` says whether the run of a checkpoint has tools.
    """
    found: list[dict[str, Any]] = []
    for row in folder.rows(wait_s=1.0)[0]:
        known = folder.get(row["id"], is_read=False)
        if known.problem is None and row["stage"] != "reward_model":
            has_tools = _has_tools(known)
            for step in _steps(known):
                label = f"{row['path']}, step {step}"
                found.append({"kind": "checkpoint", "label": label, "run_id": row["id"],
                              "step": step, "tools": has_tools})  # fmt: skip
    return found


def _has_tools(known: KnownRun) -> bool:
    try:
        settings: Any = known.directory.read_settings()
        block = settings["actor_rollout_ref"]["rollout"]["multi_turn"]
        paths = block.get("tool_config_path"), block.get("function_tool_path")
        return bool(block["enable"] and any(paths))
    except (UserError, LookupError, TypeError, AttributeError):
        return False


def _steps(known: KnownRun) -> list[int]:
    try:
        names = [path.name for path in (known.directory.root / "checkpoints").iterdir()]
    except OSError:
        return []
    return sorted((step for name in names if (step := step_of(name)) is not None), reverse=True)


@final
class _Side:
    """One process of a chat."""

    def __init__(self, words: Sequence[str]) -> None:
        """`words` are the arguments of the process."""
        module = "luyen.studio.actions.chat_worker"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,
        )  # fmt: skip

    def answer(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Events of the answer, up to `done` or `error`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it ended: what it said before is read below
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] != "ready":
                yield event
            if event["event"] in ("done", "error"):
                return
        yield {"event": "error", "message": "the process of the chat ended"}

    def close(self) -> None:
        """End the process and those that its tools started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # it leads a session of its own
        self._process.wait(_END_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:
                    continue


@final
class _Chat:
    """A conversation with one or two policies."""

    def __init__(self, sides: list[_Side]) -> None:
        self.sides = sides
        self.used = time.monotonic()
        self.lock = threading.Lock()

    def close(self) -> None:
        """End its processes."""
        for side in self.sides:
            side.close()


@final
class Chats:
    """The open chats of a studio; safe to use from several threads."""

    def __init__(self, folder: RunFolder, *, is_trusting: bool) -> None:
        self._folder = folder
        self._is_trusting = is_trusting
        self._lock = threading.Lock()
        self._chats: dict[str, _Chat] = {}

    def checkpoint_words(self, run_id: str, step: int, *, has_tools: bool) -> list[str]:
        """Arguments of a side that loads a checkpoint; a refusal where it may not be loaded."""
        known = self._folder.get(run_id)
        place = checkpoint_of(known, step)
        from luyen.config.trust import require_trust  # loads the schema of a run

        require_trust(known.directory, is_trusted=self._is_trusting)
        if has_tools and not _has_tools(known):
            fix = "begin a chat without tools"
            raise Refusal(422, "the run has no tools", field="tools", fix=fix)
        more = [("--tools", has_tools), ("--trust", self._is_trusting)]
        return [str(place), *(word for word, is_on in more if is_on)]

    def open(self, chosen: Sequence[Sequence[str]]) -> str:
        """Begin a chat between the user and one or two sides; returns its id."""
        with self._lock:
            if len(self._chats) >= _MOST_CHATS:
                oldest = min(self._chats, key=lambda name: self._chats[name].used)
                self._chats.pop(oldest).close()
            chat_id = secrets.token_hex(8)
            self._chats[chat_id] = _Chat([_Side(words) for words in chosen])
        return chat_id

    def say(self, chat_id: str, message: dict[str, Any]) -> Iterator[bytes]:
        """Send a message to every side; yields server-sent events as they come."""
        chat = self._chats.get(chat_id)
        if chat is None:
            fix = "begin a new one"
            raise Refusal(404, "there is no such chat: it was closed", field="id", fix=fix)
        if not chat.lock.acquire(blocking=False):
            raise Refusal(409, "the last message is still being answered", field="id")
        chat.used = time.monotonic()
        events: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()

        def follow(index: int, side: _Side) -> None:
            try:
                for event in side.answer(message):
                    events.put((index, event))
            except (OSError, ValueError):
                events.put((index, {"event": "error", "message": "the chat was closed"}))
            events.put((index, None))

        threads = [threading.Thread(target=follow, args=(i, side), daemon=True)
                   for i, side in enumerate(chat.sides)]  # fmt: skip
        for thread in threads:
            thread.start()
        threading.Thread(target=_release, args=(chat, threads), daemon=True).start()
        return self._merged(events, len(threads))

    def _merged(
        self, events: "queue.Queue[tuple[int, dict[str, Any] | None]]", count: int
    ) -> Iterator[bytes]:
        while count:
            try:
                side, event = events.get(timeout=_MOST_S)
            except queue.Empty:
                return
            if event is None:
                count -= 1
                continue
            name = event.pop("event")
            yield f"event: {name}\ndata: ".encode() + json_bytes({"side": side, **event}) + b"\n\n"

    def tick(self) -> None:
        """Close chats that were idle for long."""
        with self._lock:
            now = time.monotonic()
            idle = [name for name, chat in self._chats.items()
                    if now - chat.used > _IDLE_S and not chat.lock.locked()]  # fmt: skip
            for name in idle:
                self._chats.pop(name).close()

    def close(self, chat_id: str | None = None) -> None:
        """End a chat, or all of them."""
        with self._lock:
            names = list(self._chats) if chat_id is None else [chat_id]
            for name in names:
                chat = self._chats.pop(name, None)
                if chat is not None:
                    chat.close()


def _release(chat: _Chat, threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join()
    chat.used = time.monotonic()
    chat.lock.release()
