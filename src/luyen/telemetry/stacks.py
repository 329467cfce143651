"""Diagnostics of a running process: stacks of its threads and tasks, and its child processes.

Any thread may call this, even while the main thread hangs; it never blocks.
"""

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any

from luyen.base.secrets import masked_words

_PROC = Path("/proc")


def describe_process(headline: str) -> str:
    """Text with every thread, every asyncio task of a running loop, and every child process.

    Example:
        >>> page = describe_process("step 3 hangs")
        >>> page.splitlines()[0], "thread MainThread" in page, "describe_process" in page
        ('step 3 hangs', True, True)
    """
    frames = sys._current_frames()
    parts = [f"{headline}\nprocess {os.getpid()}: {' '.join(masked_words(sys.orig_argv))}"]
    names = {thread.ident: thread for thread in threading.enumerate()}
    ordered = sorted(frames, key=lambda ident: ident != threading.main_thread().ident)
    for ident in ordered:
        thread = names.get(ident)
        name = "of foreign code" if thread is None else thread.name
        parts.append(f"thread {name}\n{_joined(traceback.format_stack(frames[ident]))}")
    for loop in running_loops(frames):
        parts += [_task_text(task) for task in _tasks(loop)]
    parts.append("\n".join(["child processes", *(child_lines() or ["  none are known"])]))
    return "\n\n".join(parts) + "\n"


def running_loops(frames: dict[int, FrameType]) -> list[asyncio.AbstractEventLoop]:
    """The running event loops of all threads, found by their stacks; asyncio has no such API."""
    found: list[asyncio.AbstractEventLoop] = []
    for frame in frames.values():
        for above, _ in traceback.walk_stack(frame):
            if above.f_code.co_name == "run_forever":
                loop = above.f_locals.get("self")
                if isinstance(loop, asyncio.AbstractEventLoop) and loop not in found:
                    found.append(loop)
    return found


def _tasks(loop: asyncio.AbstractEventLoop) -> list["asyncio.Task[Any]"]:
    return sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())


def _task_text(task: "asyncio.Task[Any]") -> str:
    """The stack at which a task is suspended, outermost coroutine first."""
    lines: list[str] = []
    for frame in _suspended(task.get_coro()):
        lines += traceback.format_list([_summary(frame)])
    return f"task {task.get_name()}\n{_joined(lines)}"


def _summary(frame: FrameType) -> traceback.FrameSummary:
    code = frame.f_code
    return traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name)


def _suspended(coroutine: Any) -> Iterator[FrameType]:
    """Frames of a coroutine and of those it awaits."""
    while True:
        match coroutine:
            case CoroutineType():
                frame, coroutine = coroutine.cr_frame, coroutine.cr_await
            case GeneratorType():
                frame, coroutine = coroutine.gi_frame, coroutine.gi_yieldfrom
            case AsyncGeneratorType():
                frame, coroutine = coroutine.ag_frame, coroutine.ag_await
            case _:
                return
        if frame is not None:
            yield frame


def child_lines() -> list[str]:
    """Pid, state and command of every descendant process, from /proc."""
    below: dict[int, list[tuple[int, str]]] = {}
    for entry in _PROC.glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            below.setdefault(int(parent), []).append((int(entry.name), state))
        except (OSError, ValueError):
            continue  # the process ended during the scan
    return list(_descend(below, os.getpid(), "  "))


def _descend(below: dict[int, list[tuple[int, str]]], pid: int, indent: str) -> Iterator[str]:
    for child, state in sorted(below.get(pid, [])):
        yield f"{indent}{child} ({state}) {_command(child)}"
        yield from _descend(below, child, indent + "  ")


def _command(pid: int) -> str:
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    return b" ".join(words).decode(errors="replace").strip()


def _joined(lines: list[str]) -> str:
    return "".join(lines).rstrip("\n")
