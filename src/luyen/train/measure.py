"""A policy measured on validation rows, exactly as a run measures itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from luyen.base.errors import UserError
from luyen.base.records import Prompt, Rollout
from luyen.config.written import refuse_masked
from luyen.rewards.step import Scored
from luyen.train.checkpointed import Opened
from luyen.train.draws import draws_of
from luyen.train.evaluate import scored_metrics
from luyen.train.player import Player
from luyen.train.sampling import validation_sampling


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a measurement found.

    Example:
        >>> Measured(metrics={"val/accuracy": 0.5}, groups=()).metrics["val/accuracy"]
        0.5
    """

    metrics: Mapping[str, float]
    """`val/...` as in the run's own metrics."""
    groups: tuple[Scored, ...]
    """Every rollout with its score."""
    prompts: tuple[Prompt, ...] = ()
    """All prompts, in the order of their draws."""
    broken: tuple[Rollout, ...] = ()
    """Rollouts that could not be played to an end and were judged by nobody."""


def measure(opened: Opened, *, progress: Callable[[int, int], None]) -> Measured:
    """Rollouts on the validation rows, scored; `progress` hears how many prompts are done.

    The random numbers are those of the run's own validation, and batching changes none of them:
    the same weights give the same result.
    """
    config = opened.config
    val_kwargs, data = config.actor_rollout_ref.rollout.val_kwargs, config.data
    if not data.val_files:
        fix = "add data.val_files=FILE or a task source such as data.val_files=arithmetic://sum"
        raise UserError("data.val_files", None, "there is nothing to measure on", fix)
    refuse_masked(config, ("data", "reward"))
    at_once = max(1, config.actor_rollout_ref.rollout.max_num_seqs // val_kwargs.n)
    sampling = validation_sampling(config, opened.tokenizer)
    scored: list[Scored] = []
    with Player(opened) as player:
        prompts = player.prompts(data.val_files, most=data.val_max_samples)
        for first in range(0, len(prompts), at_once):
            progress(first, len(prompts))
            some = prompts[first : first + at_once]
            draws = draws_of(some, step=0, first=first, samples=val_kwargs.n)
            scored += player.play(draws, sampling, purpose="validation")
        player.settle(scored)
        broken = player.broken
    progress(len(prompts), len(prompts))
    is_multi_turn = config.actor_rollout_ref.rollout.multi_turn.enable
    faults = {"val/faults": float(len(broken))} if is_multi_turn else {}
    return Measured(
        metrics={**scored_metrics(scored), **faults},
        groups=tuple(scored),
        prompts=prompts,
        broken=tuple(broken),
    )
