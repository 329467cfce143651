"""What a task's tools and hooks share."""

from typing import get_args

from pydantic import BaseModel


class State(BaseModel):
    pass


def argument(cls: type, kind: type) -> type | None:
    """The parameter of a generic base that is of a kind."""
    for base in cls.__mro__:
        for origin in base.__dict__.get("__orig_bases__", ()):
            for given in get_args(origin):
                if isinstance(given, type) and issubclass(given, kind):
                    return given
    return None


def state_cls(cls: type) -> type:
    return argument(cls, State) or State
