"""Renders chat templates in a limited subprocess, and probes what a template supports.

A template is a program that came with a model. It may loop for ever, double a text until memory is
gone, or raise what it likes; a limit inside Python would not stop what happens in one call of C.
"""

import atexit
import marshal
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import Any, cast, final

from luyen.base.system import in_forked_children, signals
from luyen.config.model_folder.chat_template_worker import LENGTH, TEXT

CPU_S = 5
"""Seconds of the processor that one rendering may take."""
MEMORY = 1 << 30
"""Bytes of address space."""
CHARACTERS = 16_000_000
"""Most characters of a rendered conversation; of a longer one, twice its own length."""
SOURCE = 1_000_000
"""Most characters of a template; those of well-known models have at most some 30,000."""
_WALL_S = 300.0
"""Seconds after which a process that gets no processor is given up."""
_WORKER = Path(__file__).with_name("chat_template_worker.py")
_INHERITED_VARIABLES = ("TZ", "LANG", "LC_ALL", "LC_TIME")
"""What of the environment a template may depend on: how it writes the date."""


@final
class TemplateError(Exception):
    """Why a template gave no text, in words."""


@final
class _Process:
    """The process and the pipes to it; one request at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._started: subprocess.Popen[bytes] | None = None

    def ask(self, request: bytes) -> bytes:
        """The reply; a TemplateError where the process did not live to give one."""
        process = self._started = self._started or _start()
        assert process.stdin is not None
        assert process.stdout is not None
        said = b""
        ending = threading.Timer(_WALL_S, process.kill)
        if "poll" not in dir(select):
            ending.start()
        try:
            _write(process.stdin.fileno(), LENGTH.pack(len(request)) + request)
            said = _reply(process.stdout.fileno(), monotonic() + _WALL_S)
        except (EOFError, OSError) as error:  # a TimeoutError among them
            raise TemplateError(self._ending(process)) from error
        finally:
            ending.cancel()
            if not said:
                self.close()  # an unread reply would be taken for the next one
        return said

    def close(self) -> None:
        """End the process; the next request starts a new one."""
        process, self._started = self._started, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ending(self, process: subprocess.Popen[bytes]) -> str:
        try:
            code = process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        if code is None or -code in signals("SIGXCPU"):
            return f"it does not come to an end within {CPU_S} s of the processor"
        return f"the process that renders it ended with code {code}"


_shared = _Process()


def render(source: str, variables: Mapping[str, Any]) -> str:
    """The text that a template makes of the variables; a TemplateError says why there is none."""
    if len(source) > SOURCE:
        why = f"it has {len(source):,} characters, and {SOURCE:,} are allowed"
        raise TemplateError(why)
    try:
        request = marshal.dumps((source, _plain(variables)))
    except ValueError as error:
        raise TemplateError(f"the conversation is no plain data: {error}") from error
    process = _shared
    with process.lock:
        said = process.ask(request)
    text = said[1:].decode()
    if said[:1] != TEXT:
        raise TemplateError(text)
    return text


def _start() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    kept = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
    try:
        return _popen(path, kept)
    except OSError as error:
        raise TemplateError(f"no process can be started to render it: {error.strerror}") from error


def _popen(path: str, kept: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", str(_WORKER), str(MEMORY), str(CPU_S), str(CHARACTERS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        cwd="/",
        env={**kept, "PYTHONPATH": path},
        start_new_session=True,  # an interrupt of the terminal is not meant for it
    )


def _write(pipe: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def _readable(pipe: int) -> Callable[[float], bool]:
    """Waits until the pipe can be read, at most so many seconds; whether it can."""
    if "poll" not in dir(select):  # Windows: `_Process.ask` ends the process at the deadline
        return lambda _: True
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return lambda seconds: bool(poll.poll(seconds * 1000))


def _reply(pipe: int, deadline: float) -> bytes:
    """One reply; EOFError when the other side closes, TimeoutError at the deadline."""
    is_readable = _readable(pipe)
    said, length = bytearray(), LENGTH.size
    while len(said) < length:
        if not is_readable(max(0.0, deadline - monotonic())):
            raise TimeoutError
        part = os.read(pipe, 1 << 20)
        if not part:
            raise EOFError
        said += part
        if len(said) >= LENGTH.size:
            length = LENGTH.size + LENGTH.unpack_from(said)[0]
    return bytes(said[LENGTH.size :])


def _plain(value: Any) -> Any:
    """The same without subclasses, which marshal does not take."""
    if isinstance(value, Mapping):
        entries = cast(Mapping[Any, Any], value)
        return {_plain(name): _plain(inner) for name, inner in entries.items()}
    if isinstance(value, list | tuple):
        inner = [_plain(one) for one in cast(list[Any], value)]
        return inner if isinstance(value, list) else tuple(inner)
    return str(value) if isinstance(value, str) else value


def _forget() -> None:
    """After a fork the process, and perhaps the lock, belong to the parent."""
    global _shared
    _shared = _Process()


in_forked_children(_forget)
atexit.register(lambda: _shared.close())


# Probes of a chat template with short conversations.

FIRST, SECOND = "Kp7", "Zq4"
"""Words that no template contains."""
Messages = Sequence[Mapping[str, Any]]


def template_fault(source: str, special: Mapping[str, Any] | None = None) -> str | None:
    """Why a template cannot be used, in words; None where it can.

    `special` are the tokens that the tokenizer hands to it by name.
    """
    return _fault(source, tuple(sorted((special or {}).items())))


@lru_cache(maxsize=64)
def _fault(source: str, special: tuple[tuple[str, str], ...]) -> str | None:
    """Kept: one that never ends costs its whole time each time that it is tried."""
    try:
        texts = [_rendered(source, [_user(word)], dict(special)) for word in (FIRST, SECOND)]
    except TemplateError as error:
        # A template may refuse what it likes, but one question of a user is what rows are.
        return f"it does not render a question: {error}"
    if texts[0] == texts[1]:
        return "it ignores the messages: two different questions give the same text"
    return None


def template_remarks(source: str, special: Mapping[str, Any]) -> list[str]:
    """What a user should know of a template that can be used, a sentence each."""
    found: list[str] = []
    if template_fault(source, special) is not None:
        return found
    question = [_user(FIRST)]
    try:
        opened = _rendered(source, question, special)
        whole = _rendered(source, [*question, _said("assistant", SECOND)], special)
    except TemplateError:
        return found  # it refuses assistant messages
    header = whole.removeprefix(opened).partition(SECOND)[0]
    if whole.startswith(opened) and header.strip():
        found.append(
            f"the chat template has no generation prompt: the policy must write {header!r} itself"
        )
    try:
        system = _rendered(source, [_said("system", SECOND), *question], special)
    except TemplateError:
        return found  # it refuses them, which rows with one will say
    if SECOND not in system:
        found.append("the chat template leaves system messages out")
    return found


def _user(word: str) -> dict[str, str]:
    return _said("user", word)


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _rendered(source: str, messages: Messages, special: Mapping[str, Any] | None) -> str:
    return render(source, variables(messages, special=special or {}))


def variables(
    messages: Messages,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    special: Mapping[str, Any],
) -> dict[str, Any]:
    """What transformers hands to a template."""
    return {
        "messages": [dict(message) for message in messages],
        "tools": [dict(tool) for tool in tools] or None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **special,
    }
