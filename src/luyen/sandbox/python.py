"""Python code, run once in a process of its own behind walls, with its output cut to size.

What holds it there, and what does not, is on the page docs/sandbox.md.
"""

import asyncio
import base64
import json
import os
import shutil
import stat
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from time import perf_counter
from typing import Any, final

from luyen.base.errors import UserError
from luyen.sandbox.launch import SandboxFault, command, environment, job_file, read_report
from luyen.sandbox.limits import Limits

_FLOOD = 16
"""A program that writes so many times what is kept of its output is killed."""
_GRACE_S = 10.0
"""How long the guard may take beyond the time of the program, before it counts as failed."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What came of a program.

    Example:
        >>> ran = asyncio.run(run_python("print('hello')\\n6 * 7"))
        >>> ran.stdout, ran.value, ran.exit_code
        ('hello\\n', '42', 0)
    """

    stdout: str
    """What it printed, cut with a note at the end; bytes that are no UTF-8 are replaced."""
    stderr: str
    """The same for standard error: the traceback, if there is one."""
    value: str | None
    """How the expression at its end prints itself; None without one, or where it is None."""
    exit_code: int
    """0 for success; minus the number of the signal that ended it."""
    finished: bool
    """Whether the last line was reached; an early exit is not the end."""
    timed_out: bool
    """Whether its time was up: that of the clock, or of the CPU."""
    killed_for: str | None
    """The limit it was killed for: `time`, `cpu`, `processes`, `output`; None: for none."""
    seconds: float
    """From the call to the end, the start of the interpreter included."""


async def run_python(
    code: str,
    *,
    stdin: str = "",
    limits: Limits | None = None,
    files: Mapping[str, str | bytes] | None = None,
    then: str | None = None,
) -> Ran:
    """Run code in a fresh interpreter and working directory, both gone afterwards.

    `files` are put into the directory first. `then` is code that runs after it in the same names,
    in which case the module is not called `__main__`. A SandboxFault says that the sandbox itself
    failed; whatever the program does is no exception. Cancelled, it ends the program.
    """
    start = perf_counter()
    limits = limits or Limits()
    job: dict[str, Any] = {"code": code, "stdin": stdin, "limits": asdict(limits)}
    job["files"] = _encoded(files or {})
    if then is not None:
        job |= {"then": then, "name": "program"}
    job["work"] = work = tempfile.mkdtemp(prefix="luyen-")
    try:
        with job_file(job) as asked, job_file(None) as report:
            streams = await _guarded(
                command(asked, report), limits, asked.fileno(), report.fileno()
            )
            found = read_report(report, most=32 * limits.output_bytes + 2**16)
    finally:
        await asyncio.shield(asyncio.to_thread(_remove, work))
    return _ran(found, streams, seconds=perf_counter() - start)


def _encoded(files: Mapping[str, str | bytes]) -> dict[str, str]:
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            why = "it does not lie inside the working directory"
            raise UserError("files", name, why, "use a relative path without `..`")
    data = {n: d.encode(errors="replace") if isinstance(d, str) else d for n, d in files.items()}
    return {name: base64.b64encode(content).decode() for name, content in data.items()}


@final
class _Kept:
    """The beginning of a stream, and how much there was."""

    def __init__(self, most: int) -> None:
        self.data = bytearray()
        self.total = 0
        self.most = most

    async def read(self, stream: asyncio.StreamReader, flood: Callable[[], None]) -> None:
        """Read to the end, keeping what fits; call `flood` when it is far too much."""
        while chunk := await stream.read(2**16):
            self.total += len(chunk)
            self.data += chunk[: self.most - len(self.data)]
            if self.is_flood:
                flood()

    @property
    def is_flood(self) -> bool:
        """Whether the program wrote far more than is kept."""
        return self.total > _FLOOD * self.most

    @property
    def text(self) -> str:
        """What was kept, with a note when it is not all."""
        text = self.data.decode(errors="replace")
        left = self.total - len(self.data)
        return f"{text}\n[{left} more bytes were cut]" if left else text


async def _guarded(line: list[str], limits: Limits, asked: int, report: int) -> tuple[_Kept, _Kept]:
    """Start a guard and read what its program writes, until both have ended."""
    process = await asyncio.create_subprocess_exec(
        *line,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        env=environment(),
        pass_fds=(asked, report),
        start_new_session=True,
    )
    out, err = _Kept(limits.output_bytes), _Kept(limits.output_bytes)
    stop = _stopper(process)
    assert process.stdout is not None
    assert process.stderr is not None
    readers = (out.read(process.stdout, stop), err.read(process.stderr, stop))
    try:
        async with asyncio.timeout(limits.wall_s + _GRACE_S):
            await asyncio.gather(*readers, process.wait())
    except TimeoutError:
        pass
    finally:
        await _end(process)
    return out, err


def _stopper(process: Process) -> Callable[[], None]:
    def stop() -> None:
        with suppress(ProcessLookupError):
            process.terminate()

    return stop


async def _end(process: Process) -> None:
    """End a guard that still runs: it is asked first, since then it ends its program too."""
    if process.returncode is not None:
        return
    _stopper(process)()
    try:
        await asyncio.wait_for(process.wait(), 2.0)
    except TimeoutError:
        process.kill()
        await process.wait()


def _remove(work: str) -> None:
    """Remove a directory whatever its modes are."""

    def again(_: Any, path: str, __: Any) -> None:
        with suppress(OSError):
            os.chmod(Path(path).parent, stat.S_IRWXU)
            os.chmod(path, stat.S_IRWXU)
            shutil.rmtree(path) if Path(path).is_dir() else os.unlink(path)

    shutil.rmtree(work, onerror=again)


def _ran(found: dict[str, Any] | None, streams: tuple[_Kept, _Kept], *, seconds: float) -> Ran:
    out, err = streams
    is_flood = out.is_flood or err.is_flood
    if found is None and not is_flood:
        raise SandboxFault(f"the guard of a program failed: {err.text[-500:] or 'no word'}")
    found = found or {"exit_code": -15, "killed_for": "output", "said": ""}
    try:
        said = json.loads(found["said"])
        finished, value = True, None if said["value"] is None else str(said["value"])
    except (ValueError, TypeError, KeyError):
        finished, value = False, None
    return Ran(
        stdout=out.text,
        stderr=err.text,
        value=value,
        exit_code=found["exit_code"],
        finished=finished,
        timed_out=found["killed_for"] in ("time", "cpu"),
        killed_for="output" if is_flood else found["killed_for"],
        seconds=seconds,
    )
