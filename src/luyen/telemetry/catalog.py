"""Every metric is declared beside the code that emits it, with its unit and its meaning.

A name may hold placeholders: `<component>` stands for one part between slashes, `<path...>` for one
or more. Emitting a name that nobody declared warns once; under the tests a warning is an error.
"""

import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from luyen.base.errors import UserError

_PLACEHOLDER = re.compile(r"<\w+(\.\.\.)?>")


class UncataloguedMetric(UserWarning):
    """A metric was emitted that nobody declared."""


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
        """Add a metric and return its name; a second declaration must say the same."""
        where = owner or sys._getframe(1).f_globals["__name__"]
        made = Metric(name=name, unit=unit, doc=doc, owner=where)
        earlier = self._metrics.setdefault(name, made)
        if (earlier.unit, earlier.doc) != (unit, doc):
            why = f"{earlier.owner} declared it with another meaning: {earlier.doc!r}"
            raise UserError("metric", name, why, "choose another name, or import the first one")
        return name

    def find(self, name: str) -> Metric | None:
        """The declaration that covers a name; the exact one before a family."""
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
        """Warn once of each name that no declaration covers."""
        for name in self.missing(names):
            if name not in self._warned:
                self._warned.add(name)
                said = f"metric {name!r} is not in the catalog: declare it with `metric(...)`"
                warnings.warn(said, UncataloguedMetric, stacklevel=3)

    def all(self, *, prefix: str = "") -> tuple[Metric, ...]:
        """Every declaration made in modules whose name begins so, by name."""
        mine = (m for m in self._metrics.values() if m.owner.startswith(prefix))
        return tuple(sorted(mine, key=lambda m: m.name))


CATALOG = Catalog()
"""The metrics of this process; importing a module declares those that it emits."""


def metric(name: str, *, unit: str = "", doc: str) -> str:
    """Declare a metric beside the code that emits it; returns the name, for use as a constant."""
    owner = sys._getframe(1).f_globals["__name__"]
    return CATALOG.declare(name, unit=unit, doc=doc, owner=owner)
