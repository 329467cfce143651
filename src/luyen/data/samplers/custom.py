"""Samplers of the user: loaded from a file, and checked at every call."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar, final, overload

from luyen.base.boundary import boundary, last_line, own_copy
from luyen.base.errors import UserError, did_you_mean
from luyen.base.input_files import expanded
from luyen.base.records import Prompt
from luyen.data.samplers.protocol import AdaptiveSampler, Sampler, State


def load_sampler_class(class_path: str, class_name: str) -> Callable[..., Any]:
    """The named class; it is made as `Class(prompts, seed=..., **kwargs)` and has `take`."""
    path = expanded(class_path)
    spec = importlib.util.spec_from_file_location(f"luyen_sampler_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        why = "no Python file is there"
        raise UserError("data.sampler.class_path", class_path, why, "correct the path")
    module = importlib.util.module_from_spec(spec)
    faults: list[BaseException] = []
    with boundary(faults):
        spec.loader.exec_module(module)
    if faults:
        why = f"importing it failed: {last_line(faults[0])}"
        raise UserError("data.sampler.class_path", class_path, why, "correct the file") from faults[
            0
        ]
    if class_name not in vars(module):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        why = f"{class_path} defines no such class"
        raise UserError(
            "data.sampler.class_name", class_name, why, did_you_mean(class_name, classes)
        )
    return vars(module)[class_name]


# User samplers: exceptions and invalid indices become a UserError that names the sampler.

T = TypeVar("T")
_FIELD = "data.sampler"


def make_sampler(
    make: Callable[..., Any], name: str, prompts: Sequence[Prompt], **given: Any
) -> Sampler:
    """The sampler that `make` makes; one of the user's is guarded. A UserError if it is none."""
    if make.__module__.startswith("luyen."):
        return make(prompts, **given)
    made = _called(name, "making it", lambda: make(Copies(prompts), **own_copy(given)))
    if _called(name, "making it", lambda: isinstance(made, AdaptiveSampler)):
        return GuardedAdaptiveSampler(made, name, len(prompts))
    if _called(name, "making it", lambda: isinstance(made, Sampler)):
        return GuardedSampler(made, name, len(prompts))
    why = "a sampler has a method take(cursor, count)"
    raise UserError("data.sampler.class_name", name, why, "add the method")


def _called(name: str, what: str, call: Callable[[], T]) -> T:
    faults: list[BaseException] = []
    with boundary(faults):
        return call()
    if isinstance(faults[0], UserError):
        raise faults[0]
    why = f"{what} failed: {last_line(faults[0])}"
    raise UserError(_FIELD, name, why, "correct the sampler") from faults[0]


@final
class Copies(Sequence[Prompt]):
    """The rows as a sampler of the user sees them: whatever it does to them, ours stay.

    Example:
        >>> from luyen.base.records import make_prompt
        >>> rows = [make_prompt([{"role": "user", "content": "Hi"}])]
        >>> Copies(rows)[0].extra_info["level"] = 3
        >>> rows[0].extra_info
        {}
    """

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [own_copy(prompt) for prompt in self._prompts[index]]
        return own_copy(self._prompts[index])

    def __iter__(self) -> Iterator[Prompt]:
        return map(own_copy, self._prompts)


@final
class GuardedSampler:
    """A sampler that returns exactly `count` valid indices, or raises a UserError that names it."""

    def __init__(self, inner: Sampler, name: str, num_rows: int) -> None:
        self._inner = inner
        self._name = name
        self._num_rows = num_rows

    def take(self, cursor: int, count: int) -> list[int]:
        """The row indices at positions `cursor` to `cursor + count - 1`."""
        what = f"take({cursor}, {count})"
        rows = _called(self._name, what, lambda: [_row(r) for r in self._inner.take(cursor, count)])
        wrong = [row for row in rows if not 0 <= row < self._num_rows]
        if len(rows) != count:
            self._refuse(f"{what} gave {len(rows)} rows")
        if wrong:
            self._refuse(f"{what} gave row {wrong[0]:.6g}, and there are {self._num_rows}")
        return rows

    def _refuse(self, why: str) -> NoReturn:
        fix = "give `count` whole numbers, each from 0 to below the number of rows"
        raise UserError(_FIELD, self._name, why, fix)


@final
class GuardedAdaptiveSampler:
    """The same for a sampler that follows how well the policy does."""

    def __init__(self, inner: AdaptiveSampler, name: str, num_rows: int) -> None:
        self._inner = inner
        self._name = name
        self._rows = GuardedSampler(inner, name, num_rows)

    @property
    def state(self) -> State:
        """What it learned."""
        inner = self._inner
        return _called(self._name, "its state", lambda: tuple(_row(n) for n in inner.state))

    @state.setter
    def state(self, state: State) -> None:
        _called(self._name, "its state", lambda: setattr(self._inner, "state", tuple(state)))

    def take(self, cursor: int, count: int) -> list[int]:
        """The row indices at positions `cursor` to `cursor + count - 1`, for the current state."""
        return self._rows.take(cursor, count)

    def record(self, cursor: int, success: float) -> None:
        """Record the success rate of the rows up to position `cursor`."""
        _called(self._name, "record", lambda: self._inner.record(cursor, success))


def _row(value: Any) -> int:
    """A whole number as Python's own; numpy's are taken."""
    if isinstance(value, str | bytes | float):
        raise TypeError(f"it gave a {type(value).__name__}, and a row is a whole number")
    return int(value)
