"""Measure the model behind an endpoint on the rows of a configuration, with its reward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from luyen.base.errors import UserError
from luyen.base.records import Prompt, Rollout
from luyen.config.loader.parse import refuse_masked
from luyen.config.schema.run import RunConfig
from luyen.data.build import load_prompts
from luyen.data.tokenizer import Tokenizer
from luyen.rewards.build import build_reward
from luyen.rewards.scoring import VALIDATION, ScoreJournal
from luyen.rollout.single_turn import Group, prompt_requests
from luyen.studio.evaluation.endpoint import ChatEndpoint
from luyen.studio.evaluation.evaluator import Measurement, demand_rows, prompts_of_run
from luyen.train.builders.roles import validation_sampling
from luyen.train.validation import scored_metrics


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndpointPolicy:
    """A model behind an endpoint, and the configuration that it is measured by.

    Example:
        >>> EndpointPolicy(config=RunConfig(), endpoint=None, rows_by=None, name="a").step is None
        True
    """

    config: RunConfig
    """Rows, reward and sampling."""
    endpoint: ChatEndpoint
    """Where answers come from."""
    rows_by: Tokenizer | None
    """Measures the length of prompts (`data.max_prompt_length`); None: all rows are taken."""
    name: str
    """Its address and the name of the model, for display."""
    step: int | None = None
    """Unknown: an endpoint does not say it."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None: the endpoint has the tokens, and here are texts alone."""
        return None


def measure_endpoint(
    measured: EndpointPolicy, *, progress: Callable[[int, int], None]
) -> Measurement:
    """Answers of the endpoint to the validation rows, scored; `progress` gets (done, total)."""
    config = measured.config
    data, val_kwargs = config.data, config.actor_rollout_ref.rollout.val_kwargs
    files = demand_rows(data)
    refuse_masked(config, ("data", "reward"))
    _refuse_tokens(config)
    with build_reward(
        config.reward,
        max_response_length=data.max_response_length,
        require=config.sandbox.require,
    ) as reward:
        prompts = _prompts(measured, files)
        reward.check_sources({prompt.data_source for prompt in prompts})
        requests = prompt_requests(prompts, step=0, first=0, samples=val_kwargs.n)
        done = _Counter(len(prompts), val_kwargs.n, progress)
        groups = measured.endpoint.generate(
            requests,
            validation_sampling(config, None),
            seed=config.trainer.seed,
            template_kwargs=data.apply_chat_template_kwargs,
            finished=done,
        )
        broken = [rollout for g in groups for rollout in g.rollouts if rollout.fault is not None]
        scored = reward.score(_answered(groups, broken), ScoreJournal(purpose=VALIDATION))
        reward.apply_fault_policy(scored)
    return Measurement(
        metrics=scored_metrics(scored),
        groups=tuple(scored),
        prompts=prompts,
        broken=tuple(broken),
    )


class _Counter:
    """Called after each sample: tells the progress in prompts."""

    def __init__(self, prompts: int, samples: int, progress: Callable[[int, int], None]) -> None:
        self._total, self._samples, self._progress = prompts, samples, progress
        self._count = 0
        progress(0, prompts)

    def __call__(self) -> None:
        self._count += 1
        self._progress(self._count // self._samples, self._total)


def _prompts(measured: EndpointPolicy, files: tuple[str, ...]) -> Sequence[Prompt]:
    data = measured.config.data
    if measured.rows_by is None:
        return load_prompts(files, data, most=data.val_max_samples)
    return prompts_of_run(measured.config, measured.rows_by, files, most=data.val_max_samples)


def _answered(
    groups: Sequence[Group], broken: Sequence[Rollout]
) -> list[tuple[Prompt, tuple[Rollout, ...]]]:
    """Prompts with the rollouts that can be scored; a UserError where there are none at all."""
    kept = [(g.prompt, tuple(r for r in g.rollouts if r.fault is None)) for g in groups]
    found = [(prompt, rollouts) for prompt, rollouts in kept if rollouts]
    if not found:
        why = f"it answered none of {len(broken)} requests; the first: {broken[0].fault}"
        raise UserError("--url", None, why, "correct what the endpoint names")
    return found


def _refuse_tokens(config: RunConfig) -> None:
    """Refuse what takes the tokens of an answer, which a chat endpoint does not send."""
    if config.actor_rollout_ref.rollout.multi_turn.enable:
        why = "conversations with tools are played token by token, and a chat endpoint sends text"
        fix = "give CHECKPOINT with actor_rollout_ref.rollout.name=openai and server_urls"
        raise UserError("actor_rollout_ref.rollout.multi_turn.enable", True, why, fix)
    if config.reward.reward_model.enable:
        why = "a reward model reads the tokens of an answer, and a chat endpoint sends text"
        fix = "measure with another reward (--reward RULE), or give CHECKPOINT instead of --url"
        raise UserError("reward.reward_model.enable", True, why, fix)
