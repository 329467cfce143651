"""How a rule of the doctor is declared, and how it answers."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, final

from luyen.config.problem import Severity
from luyen.studio.doctor.read import RunRecord

Stage: TypeAlias = Literal["repair", "data", "memory", "clip and KL", "learning rate", "loss mode"]
"""What an experiment changes."""
STAGES: tuple[Stage, ...] = (
    "repair",
    "data",
    "memory",
    "clip and KL",
    "learning rate",
    "loss mode",
)
"""The order of tuning: what is broken is mended before anything is tuned, and memory comes before
the mathematics, since a change of it repeats every other measurement."""
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What to try next, and what after that.

    Example:
        >>> Experiment(stage="learning rate", change="halve it").then
        ()
    """

    stage: Stage
    """Where it stands in the order of tuning."""
    change: str
    """The one change to make."""
    then: tuple[str, ...] = ()
    """What to change after that, one at a time, if it does not help."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """What a rule saw in a run.

    Example:
        >>> mend = Experiment(stage="repair", change="mend the reward")
        >>> Symptom(says="every reward is 0", experiment=mend, steps=(4, 5)).steps
        (4, 5)
    """

    says: str
    """One sentence with the numbers."""
    experiment: Experiment
    """What to try."""
    steps: tuple[int, ...] = ()
    """Where it shows."""
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    """The evidence by name."""
    rollouts: tuple[str, ...] = ()
    """Rollouts that show it, as group and sample."""
    severity: Severity | None = None
    """How much this one matters; None: as the rule says."""


Look: TypeAlias = Callable[[RunRecord], Iterator[Symptom]]
"""A rule as a function: it sees the record of a run and nothing else."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A named look at a run.

    Example:
        >>> Rule(id="x", severity="note", title="Never.", look=lambda record: iter(())).severity
        'note'
    """

    id: str
    """Stable name."""
    severity: Severity
    """How much it matters, unless a symptom says otherwise."""
    title: str
    """What it looks for."""
    look: Look
    """The look itself."""
    steps: int = 1
    """Steps that a run must have before the rule can say anything."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A symptom under the name of its rule.

    Example:
        >>> mend = Experiment(stage="repair", change="mend the reward")
        >>> seen = Symptom(says="every reward is 0", experiment=mend)
        >>> Finding(rule="reward-all-equal", severity="error", title="", symptom=seen).is_bad
        True
    """

    rule: str
    """Id of the rule."""
    severity: Severity
    """How much it matters."""
    title: str
    """What the rule looks for."""
    symptom: Symptom
    """What was seen."""

    @property
    def is_bad(self) -> bool:
        """Whether it changes the exit code: a note does not."""
        return self.severity != "note"

    @property
    def rank(self) -> tuple[int, int]:
        """Severity first, then the order of tuning."""
        stage = STAGES.index(self.symptom.experiment.stage)
        return SEVERITIES.index(self.severity), stage

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        seen, experiment = self.symptom, self.symptom.experiment
        return {
            "rule": self.rule,
            "severity": self.severity,
            "title": self.title,
            "says": seen.says,
            "steps": list(seen.steps),
            "numbers": dict(seen.numbers),
            "rollouts": list(seen.rollouts),
            "stage": experiment.stage,
            "try": experiment.change,
            "then": list(experiment.then),
        }


RULES: dict[str, Rule] = {}


def rule(id: str, severity: Severity, *, steps: int = 1) -> Callable[[Look], Look]:
    """Declare a rule that needs so many steps; the first line of its docstring is its title."""

    def add(look: Look) -> Look:
        assert id not in RULES, f"rule {id} is declared twice"
        title = (look.__doc__ or "").strip().partition("\n")[0]
        RULES[id] = Rule(id=id, severity=severity, title=title, look=look, steps=steps)
        return look

    return add
