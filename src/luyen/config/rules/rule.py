"""How a rule is declared, what it sees, and how it answers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.input_files import expanded
from luyen.config.catalog import EstimatorFacts, LossFacts
from luyen.config.fields import all_fields
from luyen.config.machine import Machine
from luyen.config.memory import MemoryPlan
from luyen.config.model_folder.config_json import read_raw
from luyen.config.plan import BatchPlan, Placement, is_pure_distillation, loss_in_force
from luyen.config.plugins import PluginRegistry
from luyen.config.problem import Severity
from luyen.config.schema.model import ModelConfig
from luyen.config.schema.run import RunConfig


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RuleContext:
    """Everything a rule may look at.

    Example:
        >>> sorted(RuleContext.__slots__)[:3]
        ['batch', 'broken_plugins', 'config']
    """

    config: RunConfig
    """The configuration, valid field by field."""
    written: frozenset[str]
    """Keys the user wrote, as opposed to defaults."""
    known: PluginRegistry
    """Registered names, plugins included."""
    broken_plugins: dict[str, str]
    """Plugin files that could not be read, with the reason."""
    machine: Machine
    """Where the check runs."""
    where: Placement
    """Device, world size, runtime and roles."""
    batch: BatchPlan
    """The arithmetic of a step."""
    memory: MemoryPlan | None
    """Memory of each phase; None when the model's shape is unknown."""
    installed: Callable[[str], bool]
    """Whether a Python package is installed."""
    versions: Callable[[str], tuple[int, int] | None]
    """Version of an installed package."""
    missing_promises: Callable[[], tuple[str, ...]]
    """Promises of the sandbox that this machine cannot keep."""
    row_error: Callable[[RunConfig, str], UserError | None]
    """Why training would refuse the first row of a file."""

    @property
    def estimator(self) -> EstimatorFacts | None:
        """Facts of the chosen estimator; None if its name is unknown or only a teacher decides."""
        if is_pure_distillation(self.config):
            return None
        return self.known.estimators.get(self.config.algorithm.adv_estimator)

    @property
    def loss(self) -> LossFacts | None:
        """Facts of the policy loss in force; None when its name is unknown."""
        return self.known.losses.get(loss_in_force(self.config))

    def is_changed(self, path: str) -> bool:
        """Whether the user wrote another value than the default."""
        if path not in self.written or path not in all_fields():
            return False  # not written, or no key: that is reported elsewhere
        return value_at(self.config, path) != all_fields()[path].default

    def run_directory(self) -> Path:
        """Where the run would keep its files."""
        trainer = self.config.trainer
        root = expanded(trainer.default_local_dir)
        return root / trainer.project_name / trainer.experiment_name

    def models_on_devices(self) -> Iterator[tuple[str | None, dict[str, Any]]]:
        """Configs of the models that the training engine lays over devices, where they are known.

        With the key that names each; None: the policy itself.
        """
        arr, roles = self.config.actor_rollout_ref, {role.name for role in self.where.roles}
        yield None, read_raw(arr.model) or {}
        others = {
            "actor_rollout_ref.ref.path": ("reference", arr.ref.path),
            "critic.model.path": ("critic", self.config.critic.model.path),
        }
        for field, (role, path) in others.items():
            if role in roles and path is not None:
                yield field, read_raw(arr.model.model_copy(update={"path": path})) or {}
        teacher = self.config.distill.teacher_path
        if "teacher" in roles and teacher is not None:
            yield "distill.teacher_path", read_raw(ModelConfig(path=teacher)) or {}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a rule objects to: the key, the reason and the fix.

    Example:
        >>> Finding(field="trainer.nnodes", why="too many", fix="take fewer").field
        'trainer.nnodes'
    """

    field: str
    """Dotted key."""
    why: str
    """The reason."""
    fix: str
    """What to do."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A named check over several keys.

    Example:
        >>> Rule(id="X01", severity="error", doc="Never.", find=lambda s: iter(())).severity
        'error'
    """

    id: str
    """Stable identifier."""
    severity: Severity
    """How much it matters."""
    doc: str
    """What it demands."""
    find: Callable[[RuleContext], Iterator[Finding]]
    """The check itself."""


RULES: dict[str, Rule] = {}


def rule(
    id: str, severity: Severity
) -> Callable[
    [Callable[[RuleContext], Iterator[Finding]]], Callable[[RuleContext], Iterator[Finding]]
]:
    """Declare a rule; its docstring is its documentation."""

    def add(
        find: Callable[[RuleContext], Iterator[Finding]],
    ) -> Callable[[RuleContext], Iterator[Finding]]:
        assert id not in RULES, f"rule {id} is declared twice"
        RULES[id] = Rule(id=id, severity=severity, doc=(find.__doc__ or "").strip(), find=find)
        return find

    return add


def value_at(config: RunConfig, path: str) -> Any:
    """The value of a dotted key."""
    found: object = config
    for name in path.split("."):
        found = object.__getattribute__(found, name)
    return found
