"""One file beside the package that adds an estimator, a loss, a reward, a sampler and an engine.

Name it under `trainer.plugins`, and its names can be used in any configuration. What `luyen check`
must know of a name stands in its `register(...)` call as literals: it is read without importing.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch

from luyen.algorithms.advantages import Credit, CreditInputs, adv_estimators
from luyen.algorithms.policy_losses import PolicyInputs, TokenLoss, policy_losses
from luyen.base.records import Prompt, Rollout, Score
from luyen.config.schema.actor_rollout_ref import RolloutConfig
from luyen.data.samplers import samplers
from luyen.models.policy import Policy
from luyen.models.trained_weights import Fingerprint
from luyen.rewards.protocol import Reward
from luyen.rewards.reward_managers import ManagerContext, reward_managers
from luyen.rewards.tree import with_part
from luyen.rollout.protocol import Completion, Request, RolloutEngine, rollout_engines


@adv_estimators.register("group_median", baseline="group median", group_relative=True)
def group_median(inputs: CreditInputs) -> Credit:
    """Reward minus the median of the group: one lucky sample does not move the baseline."""
    rewards, groups = inputs.sequence_rewards(), inputs.layout.groups
    medians = torch.zeros_like(rewards)
    for group in groups.unique():
        medians[groups == group] = rewards[groups == group].median()
    advantages = inputs.layout.spread(rewards - medians)
    return Credit(advantages=advantages, returns=advantages)


@policy_losses.register("capped_ratio", aggregation="token-mean", hparams=("clip_ratio",))
def capped_ratio(inputs: PolicyInputs, *, clip_ratio: float = 0.2) -> TokenLoss:
    """Importance sampling whose ratio is cut off above, and nowhere else."""
    ratio = (inputs.logp - inputs.old_logp).exp().clamp(max=1 + clip_ratio)
    return TokenLoss(per_token=inputs.layout.on_mask(-inputs.advantages * ratio), metrics={})


@reward_managers.register("brief")
def brief(given: ManagerContext) -> Reward:
    """What the configuration judges by, minus a little for every token."""
    return Brief(given.judge(), share=1 / given.max_response_length)


class Brief:
    """A reward with one more part in every tree: the price of its length."""

    def __init__(self, inner: Reward, *, share: float) -> None:
        self._inner, self._share = inner, share

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inner reward, and `brief`."""
        return (*self._inner.names, "brief")

    async def __call__(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        """One tree per rollout."""
        scores = await self._inner(prompt, rollouts)
        return [
            with_part(score, Score(name="brief", value=-0.1 * self._share * r.response_length))
            for score, r in zip(scores, rollouts, strict=True)
        ]


@samplers.register("short_first")
class ShortFirst:
    """Rows by the length of their first message, the shortest first, over and over."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int) -> None:
        del seed
        lengths = [len(str(prompt.messages[0]["content"])) for prompt in prompts]
        self._order = sorted(range(len(prompts)), key=lambda i: (lengths[i], i))

    def take(self, cursor: int, count: int) -> list[int]:
        """The rows of `count` draws from `cursor` on: a function of its arguments alone."""
        return [self._order[i % len(self._order)] for i in range(cursor, cursor + count)]


@rollout_engines.register("one_by_one")
def one_by_one(
    policy: Policy, rollout: RolloutConfig, *, longest: int, decode: Callable[..., str]
) -> RolloutEngine:
    """The embedded engine, given one request at a time: slower, and with the same answers."""
    native = rollout_engines.get("native")
    return OneByOne(native(policy, rollout, longest=longest, decode=decode))


class OneByOne:
    """Holds requests back until the engine behind it is idle."""

    def __init__(self, inner: RolloutEngine) -> None:
        self._inner = inner
        self._waiting: deque[Request] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._waiting and self._inner.is_idle

    @property
    def is_batch_invariant(self) -> bool:
        """Whether an answer does not depend on what else is drawn at the same time."""
        return self._inner.is_batch_invariant

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def advance(self) -> list[Completion]:
        """Work on the present request, or begin the next."""
        if self._inner.is_idle and self._waiting:
            self._inner.submit(self._waiting.popleft())
        return self._inner.advance()

    def abort(self, request: str) -> list[Completion]:
        """Stop a request that runs, or forget one that waits."""
        self._waiting = deque(r for r in self._waiting if r.id != request)
        return self._inner.abort(request)

    def fingerprint(self) -> Fingerprint | None:
        """The weights of the engine behind it, which the trainer compares with its own."""
        return self._inner.fingerprint()

    def close(self) -> None:
        """Free what is held."""
        self._waiting.clear()
        self._inner.close()
