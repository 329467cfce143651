"""Classes of worlds as a user writes them, for the tests beside this file."""

import threading
import time
from typing import ClassVar


class Counter:
    """Counts up to a target; the row says which."""

    closed = 0

    def __init__(self, start: int = 0):
        self.start = start
        self.total = start
        self.target = None
        self.row = {}

    def reset(self, **row):
        self.row = row
        self.target = row.get("target", 3)
        return f"Count to {self.target}." if "quiet" not in row else None

    def add(self, by: int = 1) -> str:
        """Count up.

        Args:
            by: How far.
        """
        before = self.total
        time.sleep(0.01)  # another call that ran meanwhile would be lost
        self.total = before + by
        return str(self.total)

    async def look(self) -> str:
        """Say how far it is."""
        return str(self.total)

    def get_reward(self):
        return 1.0 if self.total == self.target else 0.0

    def close(self):
        Counter.closed += 1

    def _hidden(self) -> str:
        return "not a tool"


class Talker:
    """A user with a next line, and a reward that a coroutine gives."""

    def reset(self, key: int, lines: list):
        self.key = key
        self.lines = list(lines)

    def respond(self, messages):
        assert messages[-1]["role"] == "assistant"
        return self.lines.pop(0) if self.lines else None

    async def get_reward(self):
        return None


class Broken:
    """Gives what the row says, where the row says."""

    closed: ClassVar[list[int]] = []
    gate = threading.Event()

    def reset(self, **row):
        self.row = row
        return self._at("reset")

    def respond(self, messages):
        return self._at("respond")

    def get_reward(self):
        return self._at("get_reward")

    def close(self):
        self.closed.append(1)

    def _at(self, place: str):
        if self.row["place"] != place:
            return None
        if self.row["way"] == "raises":
            raise RuntimeError(f"no {place} today")
        if self.row["way"] == "hangs":
            self.gate.wait(20)
            return None
        return [1, 2]


class NoReset:
    def step(self):
        """Step."""


class Untyped:
    def reset(self, **row):
        return None

    def move(self, where):
        """Move."""


NUMBER = 4
