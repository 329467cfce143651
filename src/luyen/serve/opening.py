"""Services from checkpoints: a policy, or a reward model."""

from dataclasses import dataclass
from typing import final

from luyen.serve.dispatch import ServeLimits
from luyen.serve.metrics import ServerMetrics
from luyen.serve.model import build_engine, open_model
from luyen.serve.scoring import ScoreService, is_reward_model, open_reward_model
from luyen.serve.service import Service
from luyen.serve.serving_thread import ServingThread


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
    return open_policy(path, opening, limits)


def open_policy(
    path: str, opening: Opening, limits: ServeLimits, *, metrics: ServerMetrics | None = None
) -> Service:
    """Load a policy and start its engine; it counts into `metrics` if they are given."""
    model = open_model(
        path, name=opening.name, overrides=opening.overrides, is_trusted=opening.is_trusted
    )
    engine = ServingThread(model, build_engine)
    engine.start()
    return Service(engine, limits, is_trusted=opening.is_trusted, metrics=metrics)
