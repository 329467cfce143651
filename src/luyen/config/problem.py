"""A problem with a configuration: what, where, why, and how to mend it."""

from dataclasses import dataclass
from typing import Any, Literal, final

from luyen.base.secrets import masked, masked_tree

Severity = Literal["error", "warning", "note"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a value was written.

    Example:
        >>> str(Origin(source="math.yaml", line=31))
        'math.yaml:31'
    """

    source: str
    """A file's path as the user gave it, `command line`, or `default`."""
    line: int | None = None
    """Line in the file, from 1; None where there are no lines."""

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


DEFAULT = Origin(source="default")
COMMAND_LINE = Origin(source="command line")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One finding of `check`.

    Example:
        >>> Problem(id="A02", severity="error", field="actor_rollout_ref.rollout.n", value=1,
        ...         why="one sample has no siblings", fix="set n >= 2").origin.source
        'default'
    """

    id: str
    """Identifier of the rule, stable over versions."""
    severity: Severity
    """An error stops the run; a warning and a note do not."""
    field: str
    """Dotted key the finding is about."""
    value: Any
    """Value in force."""
    why: str
    """The reason, as a statement without a full stop."""
    fix: str
    """What to do, as an order without a full stop; empty when nothing needs doing."""
    origin: Origin = DEFAULT
    """Where the value was written."""

    def as_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "id": self.id,
            "severity": self.severity,
            "field": self.field,
            "value": masked_tree(self.value, self.field),
            "why": masked(self.why),
            "fix": self.fix,
            "origin": str(self.origin),
        }
