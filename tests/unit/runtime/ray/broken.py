"""Engines that break: light enough to be made in a moment in another process."""

import time

from luyen.base.errors import UserError
from luyen.rollout.protocol import Completion, Request


class Broken:
    """An engine that takes requests and then breaks, or refuses them, or never gets on."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._requests: list[Request] = []

    is_batch_invariant = True

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def submit(self, request: Request) -> None:
        if self._how == "refuses":
            raise UserError(f"request {request.id}", 9, "it is too long", "shorten it")
        self._requests.append(request)

    def advance(self) -> list[Completion]:
        if self._how == "user error":
            raise UserError("rollout.thing", 1, "it is wrong", "mend it")
        if self._how == "idles":
            time.sleep(0.01)
            return []
        return _divided()

    def abort(self, request: str, sample: int | None = None) -> list[Completion]:
        return []

    def fingerprint(self) -> None:
        return None

    def close(self) -> None:
        self._requests.clear()


def _divided() -> list[Completion]:
    return [] * (1 // 0)


def broken_engine(index: int, *, how: str) -> Broken:
    """An engine that breaks in a way of its own."""
    if how == "cannot be made":
        raise FileNotFoundError("no such model")
    return Broken(how)
