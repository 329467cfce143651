"""A policy measured on validation rows, exactly as a run measures itself."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import luyen.rollout.engines
from luyen.base.errors import UserError
from luyen.base.records import Prompt
from luyen.config.schema.data import Data, Sampler
from luyen.config.schema.run import RunConfig
from luyen.data.build import build_data
from luyen.data.render import Renderer
from luyen.rewards.build import build_reward
from luyen.rewards.step import Scored, score_all
from luyen.rollout.protocol import RolloutEngine, Sampling, rollout_engines
from luyen.rollout.single_turn import answer
from luyen.train.build import import_plugins
from luyen.train.checkpointed import Opened
from luyen.train.draws import draws_of
from luyen.train.evaluate import validation_metrics
from luyen.train.samples import reward_of

ENGINES = luyen.rollout.engines
"""Importing it registers the engines that come with the package."""


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


def measure(opened: Opened, *, progress: Callable[[int, int], None]) -> Measured:
    """Rollouts on the validation rows, scored; `progress` hears how many prompts are done.

    The random numbers are those of the run's own validation, and batching changes none of them:
    the same weights give the same result.
    """
    config = opened.config
    import_plugins(config.trainer.plugins)
    prompts, renderer = validation_prompts(opened)
    rollout, data = config.actor_rollout_ref.rollout, config.data
    engine: RolloutEngine = rollout_engines.get(rollout.name)(
        opened.policy,
        rollout,
        longest=data.max_prompt_length + data.max_response_length,
        decode=opened.tokenizer.decode,
    )
    at_once = max(1, rollout.max_num_seqs // rollout.val_kwargs.n)
    scored: list[Scored] = []
    with build_reward(config.reward, max_response_length=data.max_response_length) as reward:
        reward.check_sources({prompt.data_source for prompt in prompts})
        for first in range(0, len(prompts), at_once):
            progress(first, len(prompts))
            draws = draws_of(
                prompts[first : first + at_once],
                step=0,
                first=first,
                samples=rollout.val_kwargs.n,
            )
            groups = answer(
                engine,
                renderer,
                draws,
                validation_sampling(config, opened.tokenizer.stop_ids),
                seed=config.trainer.seed,
                purpose="validation",
                version=opened.step or 0,
            )
            scored += asyncio.run(score_all(reward, [(g.prompt, g.rollouts) for g in groups]))
        reward.settle(scored)
    progress(len(prompts), len(prompts))
    engine.close()
    return Measured(metrics=_metrics(scored), groups=tuple(scored))


def validation_prompts(opened: Opened) -> tuple[tuple[Prompt, ...], Renderer]:
    """The rows of `data.val_files` as validation sees them, without loading training rows."""
    data = opened.config.data
    if not data.val_files:
        fix = "add data.val_files=FILE or a task source such as data.val_files=arithmetic://sum"
        raise UserError("data.val_files", None, "there is nothing to measure on", fix)
    changes: dict[str, object] = {
        "train_files": data.val_files,
        "train_max_samples": data.val_max_samples,
        "val_files": (),
        "filter_duplicates": False,
        "sampler": Sampler(name="sequential"),
    }
    rows: Data = data.model_copy(update=changes)
    found = build_data(rows, tokenizer=opened.tokenizer, seed=opened.config.trainer.seed)
    return found.train.prompts, found.renderer


def validation_sampling(config: RunConfig, stop_ids: frozenset[int]) -> Sampling:
    """How validation draws: greedily unless `val_kwargs.do_sample`."""
    val_kwargs = config.actor_rollout_ref.rollout.val_kwargs
    return Sampling(
        max_new_tokens=config.data.max_response_length,
        temperature=val_kwargs.temperature if val_kwargs.do_sample else 0.0,
        top_k=val_kwargs.top_k if val_kwargs.do_sample else -1,
        top_p=val_kwargs.top_p if val_kwargs.do_sample else 1.0,
        stop_ids=stop_ids,
    )


def _metrics(scored: list[Scored]) -> dict[str, float]:
    rewards: dict[str, list[list[float]]] = {}
    for group in scored:
        judged = [r for r in group.rollouts if r.score is not None and r.score.value is not None]
        if judged:
            found = rewards.setdefault(group.prompt.data_source, [])
            found.append([reward_of(rollout) for rollout in judged])
    return validation_metrics(rewards)
