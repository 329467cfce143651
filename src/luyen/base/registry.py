"""A registry: a dict with a decorator and a lookup that suggests near names."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, final

from luyen.base.errors import UserError, did_you_mean

T = TypeVar("T", bound=Callable[..., Any])


@final
class Registry(Generic[T]):
    """Names to callables of one kind. A name is registered once; asking for another explains.

    Example:
        >>> shapes: Registry[Callable[[], str]] = Registry("shape", "demo.shape")
        >>> @shapes.register("round")
        ... def ball() -> str:
        ...     return "o"
        >>> shapes.get("round")()
        'o'
    """

    def __init__(self, kind: str, field: str) -> None:
        """`kind` names one entry in messages; `field` is the config key that selects it."""
        self.kind = kind
        self.field = field
        self._entries: dict[str, T] = {}
        self._facts: dict[str, dict[str, Any]] = {}

    def register(self, name: str, **facts: Any) -> Callable[[T], T]:
        """Add the decorated callable under `name`, with facts that `luyen check` can read.

        Facts are literals, since `check` learns a plugin's names from its syntax tree.
        """

        def add(entry: T) -> T:
            if name in self._entries:
                why = f"a {self.kind} of this name is registered already"
                raise UserError(self.field, name, why, "choose another name")
            self._entries[name] = entry
            self._facts[name] = facts
            return entry

        return add

    def get(self, name: str) -> T:
        """The callable registered under `name`; a UserError with near names otherwise."""
        if name not in self._entries:
            why = f"no {self.kind} of this name is registered"
            raise UserError(self.field, name, why, did_you_mean(name, self._entries))
        return self._entries[name]

    def facts(self, name: str) -> dict[str, Any]:
        """The metadata declared at registration."""
        self.get(name)
        return dict(self._facts[name])

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))
