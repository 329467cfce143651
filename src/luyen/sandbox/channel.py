"""What comes out of a program: its streams, cut to size, and the values that its steps sent."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

_FLOOD = 16
"""A program that writes so many times what is kept of its output is killed."""


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
class Stream:
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
