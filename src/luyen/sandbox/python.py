"""Python code, run once in an isolated process, with its output cut to size.

What confines it there, and what does not, is on the page docs/sandbox.md.
"""

import asyncio
import base64
import json
import os
import secrets
import stat
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from time import perf_counter
from typing import IO, Any, final

from luyen.base.errors import UserError
from luyen.base.system import flags
from luyen.sandbox.launch import (
    Limits,
    SandboxFault,
    command,
    environment,
    job_file,
    probe,
    read_report,
)

# Output of a program: its streams, cut to size, and the values that its steps sent.

_FLOOD = 16
"""A program that writes this many times what is kept of its output is killed."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Code that runs after a program, in its names.

    Example:
        >>> Step(code="add(1, 2)", is_value=True).is_value
        True
    """

    code: str
    """Statements, or an expression whose value is sent."""
    is_value: bool = False
    """Whether its last expression is sent."""


@final
class OutputStream:
    """The beginning of a stream, and how much there was."""

    def __init__(self, most: int) -> None:
        self.data = bytearray()
        self.total = 0
        self.most = most

    async def read(self, stream: asyncio.StreamReader, flood: Callable[[], None]) -> None:
        """Read to the end, keeping what fits; call `flood` when it is far too much."""
        while chunk := await stream.read(2**16):
            self.total += len(chunk)
            self.data += chunk[: _FLOOD * self.most - len(self.data)]
            if self.is_flood:
                flood()

    @property
    def is_flood(self) -> bool:
        """Whether the program wrote far more than is kept."""
        return self.total > _FLOOD * self.most

    @property
    def text(self) -> str:
        """What was kept, with a note when it is not all."""
        text = self.data[: self.most].decode(errors="replace")
        left = self.total - self.most
        return f"{text}\n[{left} more bytes were cut]" if left > 0 else text

    @property
    def lines(self) -> list[str]:
        """Its whole lines, as text."""
        return self.data.decode(errors="replace").split("\n")[:-1]


def last_line(line: str, *, mark: str) -> tuple[bool, str | None]:
    """Whether the line says that this run reached its end, and how its last value prints itself."""
    found = _read(line)
    if not isinstance(found, dict) or found.get("mark") != mark:
        return False, None
    shown = found.get("shown")
    return True, None if shown is None else str(shown)


def values_in(lines: Sequence[str]) -> tuple[str, ...]:
    """The values that steps sent: every line but the one that says that the end was reached."""
    is_marked = bool(lines) and isinstance(found := _read(lines[-1]), dict) and "mark" in found
    return tuple(lines[:-1] if is_marked else lines)


def _read(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


# Removal of a work directory: any depth, any mode, any file name.

_OPEN = os.O_RDONLY | flags("O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC")


def remove(work: str) -> None:
    """Remove a directory with all that is in it; nothing is raised.

    Directories are emptied one by one: subdirectories are first moved up one level. So neither the
    depth of a tree nor the length of its paths matters, and no more than two are open at once.
    """
    with suppress(OSError):
        os.chmod(work, stat.S_IRWXU)
    with suppress(OSError):
        top = os.open(work, _OPEN)
        try:
            while _thinned(top):
                pass
        finally:
            os.close(top)
    with suppress(OSError):
        os.rmdir(work)


def _thinned(top: int) -> bool:
    """Remove every entry of a directory after moving up what lies in it; whether any went."""
    is_less = False
    for name in os.listdir(top):
        with suppress(OSError):
            if stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
                _move_up(top, name)
                os.rmdir(name, dir_fd=top)
            else:
                os.unlink(name, dir_fd=top)
            is_less = True
    return is_less


def _move_up(top: int, name: str) -> None:
    """Empty a directory: files are removed, directories are moved next to it under a free name."""
    os.chmod(name, stat.S_IRWXU, dir_fd=top)
    inner = os.open(name, _OPEN, dir_fd=top)
    try:
        for number, one in enumerate(os.listdir(inner)):
            with suppress(OSError):
                if stat.S_ISDIR(os.stat(one, dir_fd=inner, follow_symlinks=False).st_mode):
                    os.chmod(one, stat.S_IRWXU, dir_fd=inner)  # its owner may have lost the right
                    free = f"luyen-{os.stat(one, dir_fd=inner).st_ino}-{number}"
                    os.rename(one, free, src_dir_fd=inner, dst_dir_fd=top)
                else:
                    os.unlink(one, dir_fd=inner)
    finally:
        os.close(inner)


_GRACE_S = 10.0
"""How long the guard may take beyond the time of the program, and how long to end it on request.

Killed earlier, it would leave behind what it has not ended yet, where there are no namespaces."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
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
    values: tuple[str, ...]
    """What its steps sent, as `luyen.sandbox.child.program` writes it; fewer where it ended."""
    exit_code: int
    """0 for success; minus the number of the signal that ended it."""
    finished: bool
    """Whether the last line said that it was reached. A program that wants to can say so itself."""
    timed_out: bool
    """Whether its time was up: that of the clock, or of the CPU."""
    killed_for: str | None
    """The limit it was killed for: `time`, `cpu`, `processes`, `memory`, `files`, `output`; `guard`
    where it ended its own guard; None: for none."""
    seconds: float
    """From the call to the end, the start of the interpreter included."""


async def run_python(
    code: str,
    *,
    stdin: str = "",
    limits: Limits | None = None,
    files: Mapping[str, str | bytes] | None = None,
    steps: Sequence[Step] | None = None,
) -> ProgramResult:
    """Run code in a fresh interpreter and working directory, both gone afterwards.

    `files` are put into the directory first. `steps` are run after it in the same names, in which
    case the module is not called `__main__`. A SandboxFault says that the sandbox itself failed,
    for an empty program too; whatever the program does is no exception. Cancelled, it ends the
    program.
    """
    start = perf_counter()
    limits = limits or Limits()
    mark = secrets.token_hex(16)
    job: dict[str, Any] = {"code": code, "stdin": stdin, "limits": asdict(limits), "mark": mark}
    job["files"] = _encoded(files or {})
    if steps is not None:
        job |= {"steps": [asdict(step) for step in steps], "name": "program"}
    found, streams = await _once(job, limits)
    if found is None and not _is_flood(streams):  # the machine may be to blame: once more
        found, streams = await _once(job, limits)
    if found is None and not _is_flood(streams):
        found = await _without_report(streams[1])
    return _ran(found, streams, mark=mark, seconds=perf_counter() - start)


async def _once(
    job: dict[str, Any], limits: Limits
) -> tuple[dict[str, Any] | None, tuple[OutputStream, OutputStream, OutputStream]]:
    """The report of a guard, None without one, and what its program wrote."""
    before = _free_bytes()
    work = _work()
    try:
        with _files(job | {"work": work}) as (request, report):
            try:
                streams = await _guarded(request, report, limits)
            except OSError as error:
                raise _no_guard(error) from error
            found = read_report(report)
    finally:
        try:
            await asyncio.shield(asyncio.to_thread(remove, work))
        except RuntimeError:  # no thread can be started
            remove(work)
    need_room(found, before, file_bytes=limits.file_bytes)
    return found, streams


def _work() -> str:
    try:
        return tempfile.mkdtemp(prefix="luyen-")
    except OSError as error:
        raise _no_files(error) from error


@contextmanager
def _files(job: dict[str, Any]) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The files of a job and of its report."""
    with ExitStack() as stack:
        try:
            request, report = (stack.enter_context(job_file(part)) for part in (job, None))
        except OSError as error:
            raise _no_files(error) from error
        yield request, report


def _is_flood(streams: tuple[OutputStream, OutputStream, OutputStream]) -> bool:
    return any(stream.is_flood for stream in streams)


async def _without_report(errors: OutputStream) -> dict[str, Any]:
    """What is said of a program whose guard ended twice without a report.

    Where an empty program runs, this program is the reason, so it has failed and nothing else.
    """
    probe.cache_clear()
    if await asyncio.to_thread(probe) is None:
        raise SandboxFault(f"the guard of a program failed: {errors.text[-500:] or 'no word'}")
    return {"exit_code": -9, "killed_for": "guard"}


def _encoded(files: Mapping[str, str | bytes]) -> dict[str, str]:
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            why = "it does not lie inside the working directory"
            raise UserError("files", name, why, "use a relative path without `..`")
    data = {n: d.encode(errors="replace") if isinstance(d, str) else d for n, d in files.items()}
    return {name: base64.b64encode(content).decode() for name, content in data.items()}


async def _guarded(
    request: Any, report: Any, limits: Limits
) -> tuple[OutputStream, OutputStream, OutputStream]:
    """Start a guard and read what its program writes, until both have ended."""
    near, far = os.pipe()
    channel, transport = await _reader(near)
    try:
        process = await asyncio.create_subprocess_exec(
            *command(request, report, far),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env=environment(),
            pass_fds=(request.fileno(), report.fileno(), far),
            start_new_session=True,
        )
        os.close(far)
        far = -1
        return await _streams(process, channel, limits)
    finally:
        transport.close()
        if far >= 0:
            os.close(far)


async def _streams(
    process: Process, channel: asyncio.StreamReader, limits: Limits
) -> tuple[OutputStream, OutputStream, OutputStream]:
    """What a program writes, until it and its guard have ended."""
    out, err, said = (OutputStream(limits.output_bytes) for _ in range(3))
    stop = _stopper(process)
    assert process.stdout is not None
    assert process.stderr is not None
    readers = (out.read(process.stdout, stop), err.read(process.stderr, stop))
    try:
        async with asyncio.timeout(limits.wall_s + _GRACE_S):
            await asyncio.gather(*readers, said.read(channel, stop), process.wait())
    except TimeoutError:
        pass
    finally:
        await _end(process)
    return out, err, said


async def _reader(number: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(number, "rb", 0))
    return reader, transport


def _stopper(process: Process) -> Callable[[], None]:
    def stop() -> None:
        with suppress(ProcessLookupError):
            process.terminate()

    return stop


async def _end(process: Process) -> None:
    """End a guard that still runs: first with a signal, upon which it ends its program too."""
    if process.returncode is not None:
        return
    _stopper(process)()
    try:
        await asyncio.wait_for(process.wait(), _GRACE_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def _ran(
    found: dict[str, Any] | None,
    streams: tuple[OutputStream, OutputStream, OutputStream],
    *,
    mark: str,
    seconds: float,
) -> ProgramResult:
    out, err, said = streams
    found = found or {"exit_code": -15, "killed_for": "output"}
    lines = said.lines
    finished, shown = last_line(lines[-1] if lines else "", mark=mark)
    return ProgramResult(
        stdout=out.text,
        stderr=err.text,
        value=shown,
        values=values_in(lines),
        exit_code=found["exit_code"],
        finished=finished,
        timed_out=found["killed_for"] in ("time", "cpu"),
        killed_for="output" if _is_flood(streams) else found["killed_for"],
        seconds=seconds,
    )


# Room on the disk. A program that fails because the disk was full is not wrong. So where the disk
# is short of what a program may use, the sandbox raises a SandboxFault instead of a verdict.


def _free_bytes() -> float:
    """Bytes that are left where programs work; infinite where the file system does not say."""
    try:
        found = os.statvfs(tempfile.gettempdir())
    except OSError:
        return 0.0
    if found.f_files and not found.f_favail:
        return 0.0
    return float(found.f_bavail * found.f_frsize) if found.f_blocks else float("inf")


def need_room(found: dict[str, Any] | None, before: float, *, file_bytes: int) -> None:
    """Raise a SandboxFault where the disk was short, before a program or after it.

    With a root of its own the files of a program are memory, and only a missing report counts.
    """
    left = min(before, _free_bytes())
    if left >= file_bytes or (found is not None and "root" in found["measures"]):
        return
    raise SandboxFault(
        f"{tempfile.gettempdir()} has {left / 2**20:.1f} MiB left, and a program may need"
        f" {file_bytes / 2**20:.1f} MiB; make room there, or set TMPDIR to another disk"
    )


def _no_files(error: OSError) -> SandboxFault:
    """Why the files of a guard could not be made."""
    try:
        place = tempfile.gettempdir()
    except OSError:  # no folder takes a file
        place = os.environ.get("TMPDIR", "the folder for temporary files")
    return SandboxFault(
        f"no file could be written in {place}: {error.strerror or error}; make room"
        " there, set TMPDIR to another disk, or raise the limits of this process (ulimit -f, -n)"
    )


def _no_guard(error: OSError) -> SandboxFault:
    """Why the process of a guard could not be started."""
    return SandboxFault(
        f"no process could be started: {error.strerror or error}; raise the limits of this process"
        " (ulimit -n, -u, -v), or score fewer programs at once"
    )
