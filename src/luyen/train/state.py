"""Everything a resumed run must know besides weights."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, final

from luyen.base.digests import BEGINNING
from luyen.base.errors import UserError
from luyen.base.files import plain


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """Where the loop stands. A run resumed from it goes on as if nothing had happened.

    Example:
        >>> LoopState.from_json(LoopState(step=3, cursor=96).as_json()).cursor
        96
    """

    step: int = 0
    """Steps that are done."""
    cursor: int = 0
    """Rows drawn so far: the sampler is a pure function of it."""
    returned: tuple[int, ...] = ()
    """Rows among them that nothing came of, and that come before further ones."""
    version: int = 0
    """Version of the policy's weights."""
    kl_controller: dict[str, float | None] | None = None
    """State of the KL coefficient."""
    entropy_controller: dict[str, float | None] | None = None
    """State of the entropy coefficient."""
    kl_history: tuple[float, ...] = ()
    """KL to the reference of the latest steps, for its drift."""
    sampler: tuple[int, ...] | None = None
    """What an adaptive sampler learned; None for one that is a function of the cursor alone."""
    skipped: int = 0
    """Optimizer steps left out in a row, because their gradients were not finite."""
    flat_steps: int = 0
    """First steps in which no group differed; -1 once one did."""
    first_validation: dict[str, float] = field(default_factory=dict[str, float])
    """What the first validation found, for the summary."""
    asked: tuple[dict[str, Any], ...] = ()
    """Batches of later steps that were asked for, with their rollouts."""
    reward: dict[str, Any] = field(default_factory=dict[str, Any])
    """What running statistics of the rewards have seen."""
    chain: str = BEGINNING
    """Digest of everything that was done so far, which the next step's digest goes on from."""
    origin: tuple[str, str] | None = None
    """The chain before the last step, and the hash of the weights after it; None: no step yet."""
    lacks_validation: dict[str, Any] | None = None
    """Numbers and hashes of a step that was stopped before its validation was over."""

    def as_json(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "LoopState":
        """What `as_json` gave; a ValueError or its like where it is something else."""
        for name in ("step", "cursor", "version", "skipped", "flat_steps"):
            if type(saved.get(name, 0)) is not int:
                raise ValueError(f"`{name}` is no whole number")
            if saved.get(name, 0) < 0 and name != "flat_steps":
                raise ValueError(f"`{name}` is below 0")
        if not isinstance(saved.get("first_validation"), dict | None):
            raise TypeError("`first_validation` is no object")
        sampler = saved.get("sampler")
        tuples = {
            "kl_history": tuple(saved["kl_history"]),
            "sampler": tuple(sampler) if sampler is not None else None,
            "asked": tuple(saved.get("asked", ())),
            "returned": tuple(saved.get("returned", ())),
            "origin": tuple(saved["origin"]) if saved.get("origin") else None,
        }
        return cls(**{**saved, **tuples})


def open_step(metrics: Mapping[str, float], stages: Mapping[str, str]) -> dict[str, Any]:
    """What is known of a step that lacks its validation, as a checkpoint keeps it.

    Example:
        >>> read_open_step(open_step({"a": 0.5, "b": float("inf")}, {"prompts": "ab"}))
        ({'a': 0.5, 'b': inf}, {'prompts': 'ab'})
    """
    return {"metrics": plain(metrics), "stages": dict(stages)}


def read_open_step(saved: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """What `open_step` gave, as numbers and hashes."""
    return {k: float(v) for k, v in saved["metrics"].items()}, dict(saved["stages"])


def first_line(loop: Mapping[str, Any] | None) -> int:
    """The first step that a run writes lines of, which goes on from this loop; None: a new one.

    Example:
        >>> first_line(None), first_line({"step": 4})
        (0, 5)
        >>> first_line({"step": 4, "lacks_validation": {}})
        4
    """
    if loop is None:
        return 0
    if type(loop.get("step")) is not int:
        fix = "resume from an earlier checkpoint"
        raise UserError("step of loop.json", loop.get("step"), "it is no whole number", fix)
    return int(loop["step"]) + (loop.get("lacks_validation") is None)
