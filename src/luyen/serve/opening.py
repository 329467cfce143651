"""Services from checkpoints: a policy, a reward model, or two policies that are compared."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, final

from luyen.base.errors import UserError
from luyen.serve.canary import CanaryLimits
from luyen.serve.canary_log import CanaryLog
from luyen.serve.canary_service import CanaryService
from luyen.serve.dispatch import ServeLimits
from luyen.serve.model import build_engine, open_model
from luyen.serve.reward_scores import open_scorer
from luyen.serve.scoring import ScoreService, is_reward_model, open_reward_model
from luyen.serve.service import Service
from luyen.serve.serving_thread import ServingThread

AnyService: TypeAlias = Service | ScoreService | CanaryService


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How a model is loaded.

    Example:
        >>> Opening(name="tutor").overrides
        ()
    """

    name: str | None = None
    """Name in requests; None: the path."""
    overrides: tuple[str, ...] = ()
    """`key=value` over its configuration."""
    is_trusted: bool = False
    """Whether code that another user's run names may run."""


def open_service(path: str, opening: Opening, limits: ServeLimits) -> "Service | ScoreService":
    """Load what lies at a path, a policy or a reward model, and start what it runs on."""
    name, overrides, is_trusted = opening.name, opening.overrides, opening.is_trusted
    if is_reward_model(path, is_trusted=is_trusted):
        judge = open_reward_model(path, name=name, overrides=overrides, is_trusted=is_trusted)
        return ScoreService(judge, limits)
    model = open_model(path, name=name, overrides=overrides, is_trusted=is_trusted)
    engine = ServingThread(model, build_engine)
    engine.start()
    return Service(engine, limits, is_trusted=is_trusted)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryOptions:
    """The second model of a server, and how the two are compared.

    Example:
        >>> limits = CanaryLimits(share=0.1)
        >>> CanaryOptions(path="b", limits=limits, log=Path("canary.jsonl")).reward_range is None
        True
    """

    path: str
    """The candidate."""
    limits: CanaryLimits
    """When it is promoted, and when it is rolled back."""
    log: Path
    """Where scores and decisions are written."""
    reward_range: tuple[float, float] | None = None
    """Bounds of the candidate's own reward, which scores answers; None: clients vote."""


def open_canary(
    path: str, opening: Opening, limits: ServeLimits, canary: CanaryOptions
) -> CanaryService:
    """Load two policies and compare them."""
    stable = open_service(path, opening, limits)
    if not isinstance(stable, Service):
        why = "answers are compared, and a reward model gives none"
        raise UserError("--canary", canary.path, why, "serve a policy")
    named = replace(opening, name=stable.model.name)
    candidate = open_service(canary.path, named, limits)
    if not isinstance(candidate, Service):
        why = "it is a reward model, and answers are compared"
        raise UserError("--canary", canary.path, why, "name a policy")
    log = CanaryLog(
        canary.log,
        stable=stable.model.digest,
        candidate=candidate.model.digest,
        limits=canary.limits,
    )
    scorer = None
    if canary.reward_range is not None:
        loaded = candidate.model.loaded
        scorer = open_scorer(loaded.config, candidate.model.tokenizer, bounds=canary.reward_range)
    return CanaryService(stable, candidate, log, scorer=scorer)
