"""The configuration that a measurement runs under: a run's, with what was asked for changed."""

from dataclasses import dataclass
from typing import final

from luyen.base.errors import UserError
from luyen.config.schema.reward import Reward
from luyen.config.schema.rollout import ValKwargs
from luyen.config.schema.run import RunConfig


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AskedMeasure:
    """What a command changes about a measurement; None leaves it as the configuration has it.

    Example:
        >>> config = asked_config(RunConfig(), AskedMeasure(samples=8))
        >>> val_kwargs = config.actor_rollout_ref.rollout.val_kwargs
        >>> val_kwargs.n, val_kwargs.do_sample, val_kwargs.temperature
        (8, True, 1.0)
    """

    samples: int | None = None
    """Samples of each prompt; more than one are drawn, not the likeliest."""
    temperature: float | None = None
    """Sampling temperature; 0 takes the likeliest token."""
    top_p: float | None = None
    """Keep the likeliest tokens of this total mass."""
    data: tuple[str, ...] = ()
    """Rows to measure on."""
    reward: str | None = None
    """The one rule that judges, in place of the configuration's reward."""


def asked_config(config: RunConfig, asked: AskedMeasure) -> RunConfig:
    """The configuration of the measurement. Scores that cannot be computed never end it."""
    reward = config.reward
    if asked.reward is not None:
        reward = Reward(components={asked.reward: {"rule": asked.reward}})
    reward = reward.model_copy(update={"on_fault": "drop"})
    data = config.data
    if asked.data:
        data = data.model_copy(update={"val_files": asked.data})
    arr = config.actor_rollout_ref
    rollout = arr.rollout.model_copy(update={"val_kwargs": _val_kwargs(config, asked)})
    arr = arr.model_copy(update={"rollout": rollout})
    return config.model_copy(update={"reward": reward, "data": data, "actor_rollout_ref": arr})


def with_model_of(config: RunConfig, other: RunConfig) -> RunConfig:
    """The configuration with the model of another one: rows, reward and draws stay."""
    model = other.actor_rollout_ref.model
    arr = config.actor_rollout_ref.model_copy(update={"model": model})
    return config.model_copy(update={"actor_rollout_ref": arr})


def _val_kwargs(config: RunConfig, asked: AskedMeasure) -> ValKwargs:
    rollout = config.actor_rollout_ref.rollout
    val_kwargs = rollout.val_kwargs
    draws = (asked.samples or 1) > 1 or asked.top_p is not None
    if asked.temperature == 0:
        if draws:
            why = "the likeliest token is the same every time, and other options ask to sample"
            raise UserError("--temperature", 0, why, "raise it, or leave the others out")
        return val_kwargs.model_copy(update={"n": 1, "do_sample": False})
    changes: dict[str, object] = {} if asked.samples is None else {"n": asked.samples}
    if draws or asked.temperature is not None:
        own = val_kwargs.temperature if val_kwargs.do_sample else 0.0
        changes |= {
            "do_sample": True,
            "temperature": asked.temperature or own or rollout.temperature or 1.0,
        }
    if asked.top_p is not None:
        changes["top_p"] = asked.top_p
    return val_kwargs.model_copy(update=changes)
