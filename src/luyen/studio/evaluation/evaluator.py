"""Generate and score rollouts of a loaded policy: validation metrics and sample rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Self, final

from luyen.base.errors import UserError
from luyen.base.records import Prompt, Rollout, make_prompt
from luyen.config.loader.parse import refuse_masked
from luyen.config.schema.data import DataConfig, SamplerConfig
from luyen.config.schema.run import RunConfig
from luyen.data.build import build_data
from luyen.data.render import Renderer
from luyen.data.sources import Offered
from luyen.data.tokenizer import Tokenizer
from luyen.pipeline.policy_loading import LoadedPolicy
from luyen.rewards.build import build_reward
from luyen.rewards.scoring import VALIDATION, ScoredGroup, ScoreJournal
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import Group, PromptRequest, prompt_requests
from luyen.telemetry.rollout_codec import score_tree
from luyen.train.builders.reward import JUDGE_PURPOSE as JUDGE
from luyen.train.builders.reward import EngineJudge, reward_model_services
from luyen.train.builders.roles import (
    build_engine,
    build_generation,
    tool_environment_of,
    training_sampling,
    validation_sampling,
)
from luyen.train.validation import scored_metrics

_NO_PROMPT = make_prompt([])
"""Placeholder prompt of a group that joins failed conversations of several prompts."""


@final
class Evaluator:
    """Generates and scores rollouts with a loaded policy, as its run would. Close it at the end."""

    def __init__(self, opened: LoadedPolicy) -> None:
        self._opened = opened
        config = opened.config
        data = config.data
        renderer = Renderer(opened.tokenizer, template_kwargs=data.apply_chat_template_kwargs)
        self._tool_env = tool_environment_of(config)
        self._generation = build_generation(config, self._tool_env, renderer)
        ask = EngineJudge(renderer, longest=data.max_prompt_length + data.max_response_length)
        services = reward_model_services(config, renderer, None, opened.policy.device.type)
        self._reward = build_reward(
            config.reward,
            max_response_length=data.max_response_length,
            services=replace(services, ask=ask),
            require=config.sandbox.require,
        )
        self._engine = build_engine(config, opened.policy, opened.tokenizer)
        ask.connect(partial(self._generate, purpose=JUDGE))
        self.broken: list[Rollout] = []
        """Rollouts that failed before their end and were not scored."""

    def prompts(self, files: tuple[str, ...], *, most: int | None = None) -> Sequence[Prompt]:
        """Rows of files as the run sees them, in their order, with the tools on offer."""
        opened = self._opened
        offered = self._tool_env.offered if self._tool_env is not None else None
        found = prompts_of_run(opened.config, opened.tokenizer, files, most=most, offered=offered)
        self._reward.check_sources({prompt.data_source for prompt in found})
        return found

    def _generate(
        self, requests: Sequence[PromptRequest], sampling: Sampling, *, purpose: str
    ) -> list[Group]:
        version = self._opened.step or 0
        groups = self._generation.play(
            self._engine, requests, sampling, purpose=purpose, version=version
        )
        return self._generation.all_compared(groups)

    def play(
        self, requests: Sequence[PromptRequest], sampling: Sampling, *, purpose: str
    ) -> list[ScoredGroup]:
        """Scored rollouts of the requests; failed rollouts are added to `broken`."""
        groups = self._generate(requests, sampling, purpose=purpose)
        return self._reward.score(self._sound(groups), ScoreJournal(purpose=VALIDATION))

    def _sound(self, groups: Sequence[Group]) -> list[tuple[Prompt, tuple[Rollout, ...]]]:
        talks = self._generation.conversations
        broken: list[Rollout] = []
        if talks is not None:
            broken = talks.faulty(groups, is_learned_from=False, may_be_all=True)
        self.broken += broken
        keys = {rollout.key for rollout in broken}
        kept = [(g.prompt, tuple(r for r in g.rollouts if r.key not in keys)) for g in groups]
        return [(prompt, rollouts) for prompt, rollouts in kept if rollouts]

    def apply_fault_policy(self, scored: Sequence[ScoredGroup]) -> None:
        """A UserError when scores are missing and `reward.on_fault` does not allow that.

        Also when every conversation failed, so that there is nothing to score.
        """
        talks = self._generation.conversations
        if talks is not None and self.broken and not scored:
            everything = Group(prompt=_NO_PROMPT, rollouts=tuple(self.broken))
            talks.faulty([everything], is_learned_from=False)
        self._reward.apply_fault_policy(scored)

    def close(self) -> None:
        """Close the engine, the tools and the processes of the reward."""
        self._generation.close()
        self._reward.close()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prompts_of_run(
    config: RunConfig,
    tokenizer: Tokenizer,
    files: tuple[str, ...],
    *,
    most: int | None = None,
    offered: Offered | None = None,
) -> Sequence[Prompt]:
    """Rows of files within the limits of a run, in their order and with their duplicates."""
    changes: dict[str, object] = {
        "train_files": files,
        "train_max_samples": -1 if most is None else most,
        **dict.fromkeys(("train_weights", "train_file_samples", "train_names"), ()),
        "val_files": (),
        "filter_duplicates": False,
        "sampler": SamplerConfig(name="sequential"),
    }
    rows: DataConfig = config.data.model_copy(update=changes)
    seed = config.trainer.seed
    return build_data(rows, tokenizer=tokenizer, seed=seed, offered=offered).train.prompts


def demand_rows(data: DataConfig) -> tuple[str, ...]:
    """The files that an evaluation reads; a UserError where there are none."""
    if not data.val_files:
        fix = "add data.val_files=FILE or a task source such as data.val_files=arithmetic://sum"
        raise UserError("data.val_files", None, "there is nothing to measure on", fix)
    return data.val_files


# Validation of a loaded policy, with the same random numbers as validation in training.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Result of a validation.

    Example:
        >>> Measurement(metrics={"val/accuracy": 0.5}, groups=()).metrics["val/accuracy"]
        0.5
    """

    metrics: Mapping[str, float]
    """`val/...` as in the run's own metrics."""
    groups: tuple[ScoredGroup, ...]
    """Every rollout with its score."""
    prompts: Sequence[Prompt] = ()
    """All prompts, in the order of their requests."""
    broken: tuple[Rollout, ...] = ()
    """Rollouts that failed before their end and were not scored."""


def measure(opened: LoadedPolicy, *, progress: Callable[[int, int], None]) -> Measurement:
    """Generate and score rollouts of the validation rows; `progress` gets (done, total) prompts.

    The random numbers are those of the run's own validation, and batching changes none of them:
    the same weights give the same result.
    """
    config = opened.config
    val_kwargs, data = config.actor_rollout_ref.rollout.val_kwargs, config.data
    files = demand_rows(data)
    refuse_masked(config, ("data", "reward"))
    at_once = max(1, config.actor_rollout_ref.rollout.max_num_seqs // val_kwargs.n)
    sampling = validation_sampling(config, opened.tokenizer)
    scored: list[ScoredGroup] = []
    with Evaluator(opened) as evaluator:
        prompts = evaluator.prompts(files, most=data.val_max_samples)
        for first in range(0, len(prompts), at_once):
            progress(first, len(prompts))
            some = prompts[first : first + at_once]
            requests = prompt_requests(some, step=0, first=first, samples=val_kwargs.n)
            scored += evaluator.play(requests, sampling, purpose="validation")
        evaluator.apply_fault_policy(scored)
        broken = evaluator.broken
    progress(len(prompts), len(prompts))
    is_multi_turn = config.actor_rollout_ref.rollout.multi_turn.enable
    faults = {"val/faults": float(len(broken))} if is_multi_turn else {}
    return Measurement(
        metrics={**scored_metrics(scored), **faults},
        groups=tuple(scored),
        prompts=prompts,
        broken=tuple(broken),
    )


# Rollouts of a validation as rows: prompt, response, scores and decoding parameters.


class Measured(Protocol):
    """A policy that was measured, loaded here or behind an endpoint."""

    @property
    def config(self) -> RunConfig:
        """Rows, reward and sampling."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer; None where only the endpoint knows it."""
        ...

    @property
    def name(self) -> str:
        """Where it is, for display."""
        ...

    @property
    def step(self) -> int | None:
        """Steps it was trained for, if that is known."""
        ...


def sample_rows(opened: Measured, measured: Measurement) -> list[dict[str, Any]]:
    """Rows in the order of prompts and samples; failed rollouts are included with their fault."""
    prompts = measured.prompts
    played = [rollout for group in measured.groups for rollout in group.rollouts]
    rollouts = sorted([*played, *measured.broken], key=lambda r: (r.group.draw, r.sample))
    shared = {
        "checkpoint": opened.name,
        "step": opened.step,
        "decoding": decoding_of(opened),
    }
    return [{**shared, **_row(prompts[r.group.draw], r)} for r in rollouts]


def decoding_of(opened: Measured) -> dict[str, Any]:
    """Decoding parameters: rows with equal values here share their random numbers."""
    config = opened.config
    sampling = validation_sampling(config, opened.tokenizer)
    own = frozenset[int]() if opened.tokenizer is None else opened.tokenizer.stop_ids
    more = {
        "min_p": sampling.min_p,
        "min_new_tokens": sampling.min_new_tokens,
        "stop": list(sampling.stop_strings),
        "stop_token_ids": sorted(sampling.stop_ids - own),
    }
    return {
        "samples": config.actor_rollout_ref.rollout.val_kwargs.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_response_length": sampling.max_new_tokens,
        "seed": config.trainer.seed,
        # Only if set, so that rows of older versions compare equal.
        **{name: value for name, value in more.items() if value},
    }


def _row(prompt: Prompt, rollout: Rollout) -> dict[str, Any]:
    score = rollout.score
    return {
        "uid": prompt.uid,
        "data_source": prompt.data_source,
        "prompt": [dict(message) for message in prompt.messages],
        "ground_truth": prompt.ground_truth,
        "sample": rollout.sample,
        "messages": [dict(message) for message in rollout.messages],
        "answer": rollout.text,
        "reward": None if score is None else score.value,
        "score": None if score is None else score_tree(score, is_timed=False),
        "fault": rollout.fault,
        "stop": rollout.stop.value,
        "tokens": rollout.response_length,
    }


# A few rollouts of a policy, generated as in training or validation.


def sample_rollouts(
    opened: LoadedPolicy, *, count: int, samples: int, is_validation: bool
) -> list[tuple[Prompt, Rollout]]:
    """Scored rollouts of the first prompts, failed ones included."""
    data = opened.config.data
    files = data.val_files if is_validation else data.train_files
    if not files:
        field = f"data.{'val' if is_validation else 'train'}_files"
        raise UserError(field, None, "there are no rows to play", "name a file or a task source")
    sampling: Sampling = training_sampling(opened.config, opened.tokenizer)
    if is_validation:
        sampling = validation_sampling(opened.config, opened.tokenizer)
    with Evaluator(opened) as evaluator:
        prompts = evaluator.prompts(files, most=count)
        requests = prompt_requests(prompts, step=0, first=0, samples=samples)
        purpose = "validation" if is_validation else "rollout"
        scored = evaluator.play(requests, sampling, purpose=purpose)
        by_uid = {prompt.uid: prompt for prompt in prompts}
        found = [rollout for group in scored for rollout in group.rollouts]
        found = sorted([*found, *evaluator.broken], key=lambda rollout: rollout.key)
    return [(by_uid[rollout.group.uid], rollout) for rollout in found]
