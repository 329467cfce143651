"""A problem with a configuration: what, where, why, and how to fix it; ids of text findings."""

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


# Findings about the text of a configuration itself, before any rule looks at values.

TEXT_FINDINGS: dict[str, str] = {
    "C001": "The file is valid YAML and holds keys and values.",
    "C002": "No key is written twice in one file.",
    "C003": "Files and includes can be read, and do not include each other in a circle.",
    "C004": "No value is left open as `???`.",
    "C005": "Every key exists; the nearest names are offered otherwise.",
    "C006": "Every value has the type of its key and lies within its limits.",
    "C007": "Keys that only verl has are refused with the nearest thing there is.",
    "C008": "Every `${...}` can be resolved.",
    "C009": "A key whose reader is not built yet stays at its default.",
    "C010": "A key with one possible value has that value; keys of verl among them.",
    "C011": "Overrides have the form key=value.",
    "C012": "Hydra settings are named and left aside.",
    "C013": "An artifact that is named was noted by a run, or is made by an earlier stage.",
    "C014": "A pipeline lists stages by name, each with keys of its own and a run directory.",
    "C015": "A path is relative to the file that names it, not to the working directory.",
    "C016": "Other names for keys, stages and losses are read as ours; two names never disagree.",
    "A16": "A key under its name in an earlier version is read once more, with a warning.",
    "C020": "No address has a mask in the place of its password, as in a run's config.yaml.",
}

TEXT_SEVERITIES: dict[str, str] = {"C012": "note", "C015": "note", "C016": "note", "A16": "warning"}
"""Findings that are no errors."""
