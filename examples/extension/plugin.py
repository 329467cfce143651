"""A plugin: one advantage estimator, policy loss, reward manager, sampler and rollout engine.

Name this file under `trainer.plugins`; a configuration can then choose these parts by name. It uses
the public names of `luyen` only. `luyen check` does not import it: it reads the literals of each
`register(...)` call from the syntax tree.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from luyen import (
    Completion,
    Credit,
    CreditInputs,
    Fingerprint,
    ManagerContext,
    Policy,
    PolicyInputs,
    Prompt,
    Request,
    Reward,
    Rollout,
    RolloutEngine,
    Score,
    TokenLoss,
    adv_estimators,
    policy_losses,
    reward_managers,
    rollout_engines,
    samplers,
    with_part,
)


@adv_estimators.register("group_median", baseline="group median", group_relative=True)
def group_median(inputs: CreditInputs) -> Credit:
    """Reward minus the median of its group, which one outlier does not move."""
    rewards, groups = inputs.sequence_rewards(), inputs.layout.groups
    medians = torch.zeros_like(rewards)
    for group in groups.unique():
        medians[groups == group] = rewards[groups == group].median()
    advantages = inputs.layout.spread(rewards - medians)
    return Credit(advantages=advantages, returns=advantages)


@policy_losses.register("capped_ratio", aggregation="token-mean", hparams=("clip_ratio",))
def capped_ratio(inputs: PolicyInputs, *, clip_ratio: float = 0.2) -> TokenLoss:
    """Importance sampling with a ratio that is clamped from above only."""
    ratio = (inputs.logp - inputs.old_logp).exp().clamp(max=1 + clip_ratio)
    return TokenLoss(per_token=inputs.layout.on_mask(-inputs.advantages * ratio), metrics={})


@reward_managers.register("brief")
def brief(given: ManagerContext) -> Reward:
    """The reward that the configuration builds, minus a small cost for each token."""
    return Brief(given.judge(), share=1 / given.max_response_length)


class Brief:
    """Adds one part to every score tree: a penalty for the length of the response."""

    def __init__(self, inner: Reward, *, share: float) -> None:
        self._inner, self._share = inner, share

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inner reward's parts, and `brief`."""
        return (*self._inner.names, "brief")

    async def __call__(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score tree for each rollout."""
        scores = await self._inner(prompt, rollouts)
        return [
            with_part(score, Score(name="brief", value=-0.1 * self._share * r.response_length))
            for score, r in zip(scores, rollouts, strict=True)
        ]


@samplers.register("short_first")
class ShortFirst:
    """Rows in order of the length of their first message, shortest first, repeated for ever."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int) -> None:
        del seed
        lengths = [len(str(prompt.messages[0]["content"])) for prompt in prompts]
        self._order = sorted(range(len(prompts)), key=lambda i: (lengths[i], i))

    def take(self, cursor: int, count: int) -> list[int]:
        """Indices of `count` rows, starting at position `cursor` of the row order."""
        return [self._order[i % len(self._order)] for i in range(cursor, cursor + count)]


@rollout_engines.register("one_by_one")
def one_by_one(
    policy: Policy, rollout: Any, *, longest: int, decode: Callable[..., str]
) -> RolloutEngine:
    """The native engine with one request at a time: slower, same tokens. `rollout` is its block."""
    native = rollout_engines.get("native")
    return OneByOne(native(policy, rollout, longest=longest, decode=decode))


class OneByOne:
    """Queues requests until the wrapped engine is idle."""

    def __init__(self, inner: RolloutEngine) -> None:
        self._inner = inner
        self._waiting: deque[Request] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether no request is queued or running."""
        return not self._waiting and self._inner.is_idle

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a response is independent of the other requests of the batch."""
        return self._inner.is_batch_invariant

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def advance(self) -> list[Completion]:
        """Advance the running request, or start the next one."""
        if self._inner.is_idle and self._waiting:
            self._inner.submit(self._waiting.popleft())
        return self._inner.advance()

    def abort(self, request: str, sample: int | None = None) -> list[Completion]:
        """Stop a request or one sample of it; the wrapped engine answers for queued ones, too."""
        for queued in [r for r in self._waiting if r.id == request]:
            self._waiting.remove(queued)
            self._inner.submit(queued)
        return self._inner.abort(request, sample)

    def fingerprint(self) -> Fingerprint | None:
        """Fingerprint of the wrapped engine's weights; the trainer compares it with its own."""
        return self._inner.fingerprint()

    def close(self) -> None:
        """Drop queued requests and close the wrapped engine."""
        self._waiting.clear()
        self._inner.close()
