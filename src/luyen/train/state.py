"""State of the loop: progress, what a checkpoint keeps, the snapshot of a step's start."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, final

from luyen.algorithms.controllers import (
    AdaptiveEntropyController,
    AdaptiveKLController,
    FixedKLController,
)
from luyen.algorithms.objective import Objective
from luyen.base.digests import BEGINNING
from luyen.base.errors import UserError
from luyen.base.files import plain
from luyen.train.advantages import AdvantageConfig
from luyen.train.batch import RequiredSignals
from luyen.train.rollouts import RolloutHandle

_MOST = 2**53
"""What no counter of a run reaches, and a float still holds."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """Progress of the loop in a checkpoint; a run resumed from it repeats an uninterrupted one.

    Example:
        >>> LoopState.from_json(LoopState(step=3, cursor=96).as_json()).cursor
        96
    """

    step: int = 0
    """Finished steps."""
    cursor: int = 0
    """Rows taken so far: the sampler is a pure function of it."""
    returned: tuple[int, ...] = ()
    """Rows among them that were returned unused, and are taken before further ones."""
    version: int = 0
    """Version of the policy's weights."""
    kl_controller: dict[str, float | None] | None = None
    """State of the KL coefficient."""
    entropy_controller: dict[str, float | None] | None = None
    """State of the entropy coefficient."""
    kl_history: tuple[float, ...] = ()
    """KL to the reference of the latest steps, for its drift."""
    sampler: tuple[int, ...] | None = None
    """State of an adaptive sampler; None for one that is a function of the cursor alone."""
    skipped: int = 0
    """Consecutive optimizer steps skipped because their gradients were not finite."""
    flat_steps: int = 0
    """Number of first steps without any reward difference inside a group; -1 after one."""
    first_validation: dict[str, float] = field(default_factory=dict[str, float])
    """Metrics of the first validation, for the summary."""
    asked: tuple[dict[str, Any], ...] = ()
    """Submitted batches of later steps, with their rollouts (`RolloutHandle.as_json`)."""
    reward: dict[str, Any] = field(default_factory=dict[str, Any])
    """Running statistics of the rewards."""
    chain: str = BEGINNING
    """Digest chain of all finished steps, which the next step extends."""
    origin: tuple[str, str] | None = None
    """Chain before the last step and hash of the weights after it; None: no step yet."""
    lacks_validation: dict[str, Any] | None = None
    """Metrics and digests of a step that was interrupted before its validation ended."""

    def as_json(self) -> dict[str, Any]:
        """JSON for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "LoopState":
        """Inverse of `as_json`; a KeyError, TypeError or ValueError for anything else."""
        for name in ("step", "cursor", "version", "skipped", "flat_steps"):
            if type(saved.get(name, 0)) is not int:
                raise ValueError(f"`{name}` is no whole number")
            if saved.get(name, 0) < 0 and name != "flat_steps":
                raise ValueError(f"`{name}` is below 0")
            if saved.get(name, 0) > _MOST:
                raise ValueError(f"`{name}` is beyond what a run can count to")
        for row in saved.get("returned", ()):
            if type(row) is not int or not 0 <= row <= _MOST:
                raise ValueError("`returned` holds what is no number of a row")
        forms = {"first_validation": dict | None, "reward": dict, "chain": str, "kl_history": list}
        forms |= {"sampler": list | None, "asked": list, "origin": list | None}
        for name, form in forms.items():
            known = list(saved[name]) if isinstance(saved.get(name), tuple) else saved.get(name)
            if name in saved and not isinstance(known, form):
                raise TypeError(f"`{name}` is of another form")
        if not all(isinstance(batch, dict) for batch in saved.get("asked", ())):
            raise TypeError("`asked` holds what is no batch")
        sampler = saved.get("sampler")
        tuples = {
            "kl_history": tuple(saved["kl_history"]),
            "sampler": tuple(sampler) if sampler is not None else None,
            "asked": tuple(saved.get("asked", ())),
            "returned": tuple(saved.get("returned", ())),
            "origin": tuple(saved["origin"]) if saved.get("origin") else None,
        }
        return cls(**{**saved, **tuples})


def unvalidated_step(metrics: Mapping[str, float], stages: Mapping[str, str]) -> dict[str, Any]:
    """Metrics and digests of a step that lacks its validation, as JSON for a checkpoint.

    Example:
        >>> saved = unvalidated_step({"a": 0.5, "b": float("inf")}, {"prompts": "ab"})
        >>> read_unvalidated_step(saved)
        ({'a': 0.5, 'b': inf}, {'prompts': 'ab'})
    """
    return {"metrics": plain(metrics), "stages": dict(stages)}


def read_unvalidated_step(
    saved: Mapping[str, Any] | None,
) -> tuple[dict[str, float], dict[str, str]]:
    """Inverse of `unvalidated_step`; empty where the checkpoint has no such step."""
    if saved is None:
        return {}, {}
    return {k: float(v) for k, v in saved["metrics"].items()}, dict(saved["stages"])


def first_logged_step(loop: Mapping[str, Any] | None) -> int:
    """The first step whose log lines are written after resuming from `loop`; None: a new run.

    Example:
        >>> first_logged_step(None), first_logged_step({"step": 4})
        (0, 5)
        >>> first_logged_step({"step": 4, "lacks_validation": {}})
        4
    """
    if loop is None:
        return 0
    if type(loop.get("step")) is not int:
        fix = "resume from an earlier checkpoint"
        raise UserError("step of loop.json", loop.get("step"), "it is no whole number", fix)
    return int(loop["step"]) + (loop.get("lacks_validation") is None)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRules:
    """What the configuration says about learning, at its initial values.

    Example:
        >>> sorted(LearningRules.__slots__)[:2]
        ['advantage_config', 'entropy_controller']
    """

    needs: RequiredSignals
    """Signals that a batch needs before advantages are computed."""
    objective: Objective
    """Objective of the policy update."""
    advantage_config: AdvantageConfig
    """How rewards become advantages."""
    kl_controller: FixedKLController | AdaptiveKLController
    """Coefficient of the KL term in the reward."""
    entropy_controller: AdaptiveEntropyController | None
    """Coefficient of the entropy bonus; None: it is constant."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """What the finished steps of a run have changed; the loop replaces it once per step.

    Example:
        >>> begin = RunProgress(kl_controller=FixedKLController(), entropy_controller=None)
        >>> replace(begin, step=1, version=1).loop_state().step
        1
    """

    kl_controller: FixedKLController | AdaptiveKLController
    """Coefficient of the KL term in the reward."""
    entropy_controller: AdaptiveEntropyController | None
    """Coefficient of the entropy bonus; None: it is constant."""
    step: int = 0
    """Finished steps; the one in progress is the next."""
    version: int = 0
    """Version of the policy's weights."""
    kl_history: tuple[float, ...] = ()
    """KL to the reference of the latest steps."""
    skipped: int = 0
    """Consecutive optimizer steps skipped because their gradients were not finite."""
    flat_steps: int = 0
    """Number of first steps without any reward difference inside a group; -1 after one."""
    origin: tuple[str, str] | None = None
    """Chain before the last step and hash of the weights after it; None: no step yet."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of the last step, without its validation."""
    stages: Mapping[str, str] = field(default_factory=dict[str, str])
    """Digests of the last step, without its metrics."""

    @classmethod
    def begin(cls, rules: LearningRules) -> "RunProgress":
        """Progress before the first step."""
        controllers = rules.kl_controller, rules.entropy_controller
        return cls(kl_controller=controllers[0], entropy_controller=controllers[1])

    def with_kl(self, kl: float, rollouts: int) -> "RunProgress":
        """KL coefficient and history after a measured KL."""
        controller = self.kl_controller.update(kl=kl, n_steps=rollouts)
        return replace(self, kl_controller=controller, kl_history=(*self.kl_history, kl)[-20:])

    def loop_state(self) -> LoopState:
        """State for a checkpoint, as far as progress determines it."""
        entropy = self.entropy_controller
        return LoopState(
            step=self.step,
            version=self.version,
            kl_controller=self.kl_controller.state(),
            entropy_controller=entropy.state() if entropy is not None else None,
            kl_history=self.kl_history,
            skipped=self.skipped,
            flat_steps=self.flat_steps,
            origin=self.origin,
        )

    def restored(self, state: LoopState) -> "RunProgress":
        """Progress of a checkpoint; values that are configured stay those of now."""
        kl, entropy = self.kl_controller, self.entropy_controller
        if state.kl_controller is not None:
            kl = kl.restore(state.kl_controller)
        if entropy is not None and state.entropy_controller is not None:
            entropy = entropy.restore(state.entropy_controller)
        metrics, stages = read_unvalidated_step(state.lacks_validation)
        return RunProgress(
            kl_controller=kl,
            entropy_controller=entropy,
            step=state.step,
            version=state.version,
            kl_history=state.kl_history,
            skipped=state.skipped,
            flat_steps=state.flat_steps,
            origin=state.origin,
            metrics=metrics,
            stages=stages,
        )


@final
class StepSnapshot:
    """Loop state at the start of a step, valid until the update changes the weights.

    An interrupted or hanging run is saved from it.
    """

    def __init__(self) -> None:
        self.state: LoopState | None = None
        """None: the update has started, or no step has begun."""
        self.pending: tuple[RolloutHandle, ...] = ()
        """Outstanding rollouts at that moment."""
        self.is_updating = False
        """Whether the weights are ahead of the progress: the step is not finished."""

    def take(self, state: LoopState, pending: tuple[RolloutHandle, ...]) -> None:
        """Snapshot the start of a step."""
        self.state, self.pending = state, pending

    def invalidate(self) -> None:
        """Drop the state: the update changes the weights from now on."""
        self.state, self.is_updating = None, True

    def finish(self) -> None:
        """The progress has the updated weights."""
        self.is_updating = False

    def refusal(self, *, saved: int) -> str | None:
        """Why a hanging run cannot be saved from this snapshot without waiting; None: it can."""
        if self.state is None:
            return "the weights are being changed, so that the newest checkpoint stays"
        if self.state.step == saved:
            return f"nothing is to be saved after step {saved}"
        if any(one.needs_other_weights(self.state.version) for one in self.pending):
            return "rollouts of later steps are in progress, so that the newest checkpoint stays"
        return None


def snapshot_rollouts(handles: Sequence[RolloutHandle], version: int) -> list[dict[str, Any]]:
    """JSON of the handles for a checkpoint with weights of this version.

    Unfinished rollouts of another version are waited for; those of this version are regenerated.
    """
    return [
        handle.as_json() if handle.needs_other_weights(version) else handle.snapshot()
        for handle in handles
    ]


def salvage_rollouts(handles: Sequence[RolloutHandle]) -> list[dict[str, Any]]:
    """JSON of the handles when generation is lost: of unfinished ones, only which rows they have.

    On resume those rows are generated again, with the weights of the checkpoint.
    """

    def salvage(handle: RolloutHandle) -> dict[str, Any]:
        try:
            return handle.snapshot()
        except UserError:  # its generation is the one that failed
            return {**handle.slot.as_json(), "drawn": None}

    return [salvage(handle) for handle in handles]
