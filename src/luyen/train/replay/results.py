"""What a replay found: numbers side by side, and the stages that came out as in the run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

from luyen.train.replay.rebuild import StepCheck
from luyen.train.replay.regenerate import Regenerated
from luyen.train.replay.tokens import TokenChange


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number of a step, twice.

    Example:
        >>> Number(before=0.5, after=0.5).is_equal, Number(before=0.0, after=-0.0).is_equal
        (True, False)
    """

    before: float | None
    """As the run recorded it, or without the change; None: it has no such number."""
    after: float | None
    """As it came out again, or with the change; None: there is none."""

    @property
    def is_equal(self) -> bool:
        """Whether they are the same to the last bit."""
        return repr(self.before) == repr(self.after)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A step that was done again, held against the record.

    Example:
        >>> Replayed(run="runs/a/b", step=3, start="the beginning", notes=(), numbers={},
        ...     checks=(StepCheck(step=3, equal=("weights",), unequal=()),)).is_equal
        True
    """

    run: str
    """Folder of the run."""
    step: int
    """The step."""
    start: str
    """What the steps before were done again from."""
    checks: tuple[StepCheck, ...]
    """Every step that was done again, the wanted one last."""
    numbers: Mapping[str, Number]
    """What the step measured, recorded and again."""
    notes: tuple[str, ...]
    """What could not be compared, and what may explain a difference."""

    @property
    def parting(self) -> StepCheck | None:
        """The first step that is not what the run did."""
        return next((one for one in self.checks if one.unequal), None)

    @property
    def is_equal(self) -> bool:
        """Whether every stage of every step and every recorded number came out again."""
        known = [number for number in self.numbers.values() if number.before is not None]
        return self.parting is None and all(number.is_equal for number in known)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Varied:
    """A step as it was and under changed keys, from the same weights.

    Example:
        >>> Varied(run="runs/a/b", step=3, start="the beginning", keys={}, checks=(), numbers={},
        ...        tokens=(), stages=(), notes=()).tokens
        ()
    """

    run: str
    """Folder of the run."""
    step: int
    """The step."""
    start: str
    """What the steps before were done again from."""
    checks: tuple[StepCheck, ...]
    """The steps that were done again as they were, the wanted one last."""
    keys: Mapping[str, tuple[Any, Any]]
    """What was changed."""
    numbers: Mapping[str, Number]
    """What the step measured, without and with the change."""
    tokens: tuple[TokenChange, ...]
    """Every token that both visited, the one whose part in the loss moved most first."""
    stages: tuple[str, ...]
    """Stages that the change acts on."""
    notes: tuple[str, ...]
    """What a reader should know."""

    @property
    def parting(self) -> StepCheck | None:
        """The first step that is not what the run did, without any change."""
        return next((one for one in self.checks if one.unequal), None)

    @property
    def is_equal(self) -> bool:
        """Whether the step without the change is what the run did."""
        return self.parting is None


def as_json(found: Replayed | Varied | Regenerated) -> dict[str, Any]:
    """Plain data; what is derived from the records is there as well."""
    page = {"equal": found.is_equal, **asdict(found)}
    if isinstance(found, Regenerated):
        return page
    parting = found.parting
    where = None if parting is None else {"step": parting.step, "stage": parting.parted_at}
    return {**page, "parting": where}
