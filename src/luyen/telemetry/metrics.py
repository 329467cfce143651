"""Metrics: the catalog that declares each with unit and meaning, and the file `metrics.jsonl`.

A name may hold placeholders: `<component>` stands for one part between slashes, `<path...>` for one
or more. Emitting an undeclared name warns once; in tests the warning is an error.
"""

import re
import sys
import warnings
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.files import json_line, read_lines, write_whole

_PLACEHOLDER = re.compile(r"<\w+(\.\.\.)?>")


class UncataloguedMetric(UserWarning):
    """A metric was emitted without a declaration."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What a name in the metrics means.

    Example:
        >>> Metric(name="reward/mean", unit="", doc="Mean reward.", owner="luyen.train").name
        'reward/mean'
    """

    name: str
    """Name, with placeholders where a family is declared."""
    unit: str
    """Unit; empty for a pure number."""
    doc: str
    """What it measures, in one sentence."""
    owner: str
    """Module that declared it."""

    def pattern(self) -> str:
        """The names it stands for, as a regular expression."""
        parts, end = [""], 0
        for found in _PLACEHOLDER.finditer(self.name):
            parts += [re.escape(self.name[end : found.start()]), ".+" if found[1] else "[^/]+"]
            end = found.end()
        return "".join([*parts, re.escape(self.name[end:])])


@final
class Catalog:
    """Metrics by name.

    Example:
        >>> catalog = Catalog()
        >>> catalog.declare("reward/<component>/mean", doc="Mean of one component.")
        'reward/<component>/mean'
        >>> catalog.missing(["reward/format/mean", "reward/mean"])
        ['reward/mean']
    """

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}
        self._known: set[str] = set()
        self._warned: set[str] = set()

    def declare(self, name: str, *, unit: str = "", doc: str, owner: str | None = None) -> str:
        """Add a metric and return its name; a second declaration must have equal unit and doc."""
        where = owner or sys._getframe(1).f_globals["__name__"]
        made = Metric(name=name, unit=unit, doc=doc, owner=where)
        earlier = self._metrics.setdefault(name, made)
        if (earlier.unit, earlier.doc) != (unit, doc):
            why = f"{earlier.owner} declared it with another meaning: {earlier.doc!r}"
            raise UserError("metric", name, why, "choose another name, or import the first one")
        return name

    def find(self, name: str) -> Metric | None:
        """The declaration that covers a name; an exact name wins over a family."""
        if name in self._metrics:
            return self._metrics[name]
        families = (m for m in self._metrics.values() if "<" in m.name)
        return next((m for m in families if re.fullmatch(m.pattern(), name)), None)

    def missing(self, names: Iterable[str]) -> list[str]:
        """The names that no declaration covers."""
        unknown: list[str] = []
        for name in names:
            if name in self._known:
                continue
            if self.find(name) is None:
                unknown.append(name)
            else:
                self._known.add(name)
        return unknown

    def warn_of_missing(self, names: Iterable[str]) -> None:
        """Warn once about each name that no declaration covers."""
        for name in self.missing(names):
            if name not in self._warned:
                self._warned.add(name)
                message = f"metric {name!r} is not in the catalog: declare it with `metric(...)`"
                warnings.warn(message, UncataloguedMetric, stacklevel=3)

    def all(self, *, prefix: str = "") -> tuple[Metric, ...]:
        """Every declaration made in modules whose name begins with `prefix`, sorted by name."""
        mine = (m for m in self._metrics.values() if m.owner.startswith(prefix))
        return tuple(sorted(mine, key=lambda m: m.name))


CATALOG = Catalog()
"""The metrics of this process; importing a module declares those that it emits."""


def metric(name: str, *, unit: str = "", doc: str) -> str:
    """Declare a metric in the module that emits it; returns the name, for use as a constant."""
    owner = sys._getframe(1).f_globals["__name__"]
    return CATALOG.declare(name, unit=unit, doc=doc, owner=owner)


# `metrics.jsonl`: one line per step.
#
# A line holds a checksum of its other content. The checksum is a string, while metrics are numbers,
# so that damage to the key of the checksum is detected as well.

CLOCK = ("time/", "role/", "wait/", "publish/", "judging/")
"""Prefixes of metrics that depend on the clock, on the placement of roles, or on cached scores:
they are left out when runs are compared."""
_STEP, _CHECK = "step", "check"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What one step measured.

    Example:
        >>> StepMetrics(step=1, values={"reward/mean": 0.5, "time/step": 1.2}).timeless()
        {'reward/mean': 0.5}
    """

    step: int
    """The step."""
    values: dict[str, float]
    """Metric to value; NaN and infinities included."""

    def timeless(self) -> dict[str, float]:
        """The values without those in `CLOCK`: an exact repetition of the run has the same ones."""
        return {name: v for name, v in self.values.items() if not name.startswith(CLOCK)}


def metrics_line(step: int, values: Mapping[str, float]) -> str:
    """The line of a step: sorted keys, exact floats, and the checksum.

    Example:
        >>> metrics_line(1, {"loss": 0.5})
        '{"check": "crc32:fdbc76c1", "loss": 0.5, "step": 1}\\n'
    """
    entry = {**{name: float(value) for name, value in values.items()}, _STEP: step}
    return json_line({**entry, _CHECK: _check_of(entry)})


def read_metrics(path: Path) -> list[StepMetrics]:
    """The steps in a metrics file, in order; a torn last line is left out.

    A UserError when the checksum of a line does not match. Lines without a checksum are accepted:
    they were written by an older version, or by hand.
    """
    return [_step_of(path, number, line) for number, line in enumerate(read_lines(path), 1)]


def keep_before(path: Path, first_step: int) -> None:
    """Drop the lines from `first_step` on, and a torn last line; all kept lines are verified."""
    if path.is_file():
        kept = [s for s in read_metrics(path) if s.step < first_step] if first_step else []
        write_whole(path, "".join(metrics_line(s.step, s.values) for s in kept))


def _step_of(path: Path, number: int, line: dict[str, Any]) -> StepMetrics:
    entry = {name: value for name, value in line.items() if name != _CHECK}
    try:
        found = StepMetrics(
            step=int(entry[_STEP]),
            values={name: float(value) for name, value in entry.items() if name != _STEP},
        )
        is_sound = _CHECK not in line or line[_CHECK] == _check_of(entry)
    except (LookupError, TypeError, ValueError):
        found, is_sound = None, False
    if found is None or not is_sound:
        why = f"line {number} is not that of a step as it was written"
        raise UserError("file", str(path), why, "restore it from a copy, or remove the line")
    return found


def _check_of(entry: Mapping[str, Any]) -> str:
    return f"crc32:{zlib.crc32(json_line(entry).encode(errors='surrogatepass')):08x}"


def series(steps: list[StepMetrics], name: str) -> tuple[list[int], list[float]]:
    """Steps that have a metric, and its values there."""
    having = [(s.step, s.values[name]) for s in steps if name in s.values]
    return [step for step, _ in having], [value for _, value in having]
