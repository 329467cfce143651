"""Toolsets: objects whose marked methods are tools."""

import contextlib
import contextvars
import re
from typing import Generic, TypeVar

from pydantic import BaseModel

C, S = TypeVar("C"), TypeVar("S")
_call_state = contextvars.ContextVar("state", default=None)


class ToolsetConfig(BaseModel):
    url: str | None = None


class Toolset(Generic[C, S]):
    def __init__(self, config):
        self.config = config
        self._exit_stack = contextlib.AsyncExitStack()

    @property
    def state(self):
        return _call_state.get()

    @property
    def server_name(self) -> str:
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    async def setup(self) -> None:
        pass

    async def setup_task(self, task) -> None:
        pass
