"""Learn from scored groups: batch, advantages, mini-batches, critic and actor updates."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar, final

import torch
from torch import Tensor

from luyen.algorithms.controllers import AdaptiveEntropyController
from luyen.algorithms.objective import Objective
from luyen.algorithms.value import explained_variance
from luyen.base.errors import UserError
from luyen.base.records import Rollout
from luyen.base.seeds import derive_key, shuffled
from luyen.config.schema.run import RunConfig
from luyen.engine.batch import PackedBatch
from luyen.engine.optim import learning_rate
from luyen.engine.step import UpdateResult
from luyen.rollout.single_turn import Group
from luyen.runtime.roles import PendingUpdate, Roles
from luyen.train.advantages import BatchAdvantages, compute_advantages
from luyen.train.batch import batch_order, compute_logprobs, pack_groups
from luyen.train.monitor import StepProfiler
from luyen.train.state import LearningRules, RunProgress

T = TypeVar("T")


def mini_batches(
    batch: PackedBatch, *, groups: int, epochs: int, shuffle: bool, seed: int, step: int
) -> Iterator[PackedBatch]:
    """Split a batch into mini-batches of `groups` whole groups; one optimizer step each.

    Loss weights are normalised over the mini-batch, so the gradient does not depend on how it is
    later cut into micro-batches. `shuffle` reorders groups by a seeded permutation per epoch.
    """
    labels = batch.layout.groups.tolist()
    members: dict[int, list[int]] = {}
    for index, label in enumerate(labels):
        members.setdefault(label, []).append(index)
    names = list(members)
    for epoch in range(epochs):
        order = names
        if shuffle:
            key = derive_key(seed, "mini-batches", step, epoch)
            order = [names[i] for i in shuffled(len(names), key)]
        for part in _parts(order, groups):
            chosen = [index for label in part for index in members[label]]
            yield batch if len(chosen) == len(labels) and not shuffle else batch.take(chosen)


def with_last(parts: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each part, and whether it is the last; reads one part ahead.

    Example:
        >>> list(with_last("ab"))
        [('a', False), ('b', True)]
    """
    left = iter(parts)
    part = next(left, None)
    while part is not None:
        later = next(left, None)
        yield part, later is None
        part = later


def _parts(names: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]


_MOST_SKIPPED = 3

BeforeUpdate: TypeAlias = Callable[[PackedBatch, Objective, int], None]
"""`(mini-batch, objective, seed)`: called before each optimizer step of the policy."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LearningContext:
    """What batches, advantages and updates are computed with, in training and in a replay.

    Example:
        >>> sorted(LearningContext.__slots__)[:3]
        ['config', 'phase', 'profiler']
    """

    config: RunConfig
    """The whole configuration."""
    roles: Roles
    """Roles that compute log-probs and updates."""
    rules: LearningRules
    """Signals, objective and advantages."""
    profiler: StepProfiler
    """Names the parts of an update in a trace."""
    phase: Callable[[str], AbstractContextManager[None]]
    """Context of a phase of the step."""
    total_steps: int
    """Steps of the whole run, for learning-rate schedules."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateOutcome:
    """What the optimizer steps of a training step measured and changed besides the weights.

    Example:
        >>> UpdateOutcome(metrics={}, skipped=1, entropy_controller=None, trainer_logp=None).skipped
        1
    """

    metrics: Mapping[str, float]
    """Mean metrics of the optimizer steps, of the critic and of the policy."""
    skipped: int
    """Consecutive optimizer steps skipped so far because their gradients were not finite."""
    entropy_controller: AdaptiveEntropyController | None
    """Coefficient of the entropy bonus after them; None: it is constant."""
    trainer_logp: Tensor | None
    """Log-probs under the weights before the update, where the update has measured them."""


def update_critic(learning: LearningContext, batch: PackedBatch, step: int) -> dict[str, float]:
    """Run all optimizer steps of the critic; no metrics where there is no critic."""
    config, roles = learning.config, learning.roles
    if not roles.has_critic:
        return {}
    critic, actor = config.critic, config.actor_rollout_ref.actor
    lr = learning_rate(critic.optim, step=step - 1, total_steps=learning.total_steps)
    parts = mini_batches(
        batch,
        groups=critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
        epochs=critic.ppo_epochs or actor.ppo_epochs,
        shuffle=actor.shuffle,
        seed=config.trainer.seed,
        step=step,
    )
    with learning.profiler.part("update critic"):
        done = [roles.update_critic(part, lr=lr) for part in parts]
    streams = batch.streams
    explained = explained_variance(streams["values"], streams["returns"], batch.layout)
    found = {} if explained is None else {"critic/explained_variance": explained}
    return _mean_metrics(done, "critic") | found


def start_update(
    learning: LearningContext,
    batch: PackedBatch,
    progress: RunProgress,
    *,
    before: BeforeUpdate | None = None,
) -> "StepUpdate":
    """Run all optimizer steps of the critic, then of the policy; the last is only started.

    During `critic_warmup` the policy is not updated.
    """
    step = progress.step + 1
    update = StepUpdate(batch, progress, critic=update_critic(learning, batch, step))
    if step > learning.config.trainer.critic_warmup:
        _start_actor(learning, batch, step, update, before)
    return update


def _start_actor(
    learning: LearningContext,
    batch: PackedBatch,
    step: int,
    update: "StepUpdate",
    before: BeforeUpdate | None,
) -> None:
    actor, seed = learning.config.actor_rollout_ref.actor, learning.config.trainer.seed
    lr = learning_rate(actor.optim, step=step - 1, total_steps=learning.total_steps)
    parts = mini_batches(
        batch,
        groups=actor.ppo_mini_batch_size,
        epochs=actor.ppo_epochs,
        shuffle=actor.shuffle,
        seed=seed,
        step=step,
    )
    for index, (part, is_last) in enumerate(with_last(parts)):
        objective = replace(
            learning.rules.objective, entropy_coeff=update.entropy_coeff(actor.entropy_coeff)
        )
        selection = derive_key(seed, "selection", step, index) >> 1
        with learning.profiler.part("update actor"):
            if before is not None:
                before(part, objective, selection)
            started = learning.roles.update_actor(
                part, objective, lr=lr, seed=selection, is_last=is_last
            )
            update.add(part, started)
            if not is_last:
                update.collect()


@final
class StepUpdate:
    """The optimizer steps of a training step; the last may still be in progress."""

    def __init__(
        self, batch: PackedBatch, progress: RunProgress, *, critic: dict[str, float]
    ) -> None:
        """`critic`: metrics of the critic's update."""
        self._batch = batch
        self._critic = critic
        self._skipped = progress.skipped
        self._entropy = progress.entropy_controller
        self._trainer_logp: Tensor | None = None
        self._pending: tuple[PackedBatch, PendingUpdate] | None = None
        self._done: list[UpdateResult] = []

    def entropy_coeff(self, constant: float) -> float:
        """Weight of the entropy bonus at the next optimizer step; `constant` if not adaptive."""
        return constant if self._entropy is None else self._entropy.applied

    def add(self, part: PackedBatch, started: PendingUpdate) -> None:
        """Add a started optimizer step; the previous one must have been collected."""
        assert self._pending is None, "the previous optimizer step was not collected"
        self._pending = part, started

    def collect(self) -> None:
        """Wait for the optimizer step in progress and update the entropy coefficient."""
        if self._pending is None:
            return
        (part, started), self._pending = self._pending, None
        updated = started.result()
        self._done.append(updated)
        if self._entropy is not None:
            self._entropy = self._entropy.update(entropy=updated.metrics["actor/entropy"])
        if updated.logp is not None:
            self._trainer_logp = _in_batch_order(self._batch, part, updated.logp)

    def result(self) -> UpdateOutcome:
        """The outcome of all optimizer steps; waits for the last."""
        self.collect()
        return UpdateOutcome(
            metrics=self._critic | (_mean_metrics(self._done, "actor") if self._done else {}),
            skipped=_count_skipped(self._skipped, self._done),
            entropy_controller=self._entropy,
            trainer_logp=self._trainer_logp,
        )


def _count_skipped(skipped: int, done: Sequence[UpdateResult]) -> int:
    """Consecutive optimizer steps with non-finite gradients; a UserError after several."""
    for updated in done:
        skipped = 0 if updated.stepped.is_applied else skipped + 1
    if skipped >= _MOST_SKIPPED:
        raise UserError(
            "actor/grad_norm",
            done[-1].stepped.grad_norm,
            f"the gradients of the last {skipped} optimizer steps were not finite and were not "
            "applied",
            "lower actor_rollout_ref.actor.optim.lr, and look at the rewards and log-probs of the "
            "last steps",
        )
    return skipped


def _in_batch_order(batch: PackedBatch, part: PackedBatch, logp: Tensor) -> Tensor:
    """Log-probs of a shuffled mini-batch, which covers the whole batch, in batch order."""
    ordered = torch.zeros_like(logp)
    ordered[part.streams["place"]] = logp
    assert ordered.shape == batch.tokens.shape, "the mini-batch is not the whole batch"
    return ordered


def _mean_metrics(done: Sequence[UpdateResult], role: str) -> dict[str, float]:
    """Mean of each metric over the optimizer steps of a training step."""
    names = {name for updated in done for name in updated.metrics}
    found = {n: sum(u.metrics[n] for u in done) / len(done) for n in sorted(names)}
    norms = [updated.stepped.grad_norm for updated in done]
    return {
        **found,
        f"{role}/grad_norm": sum(norms) / len(norms),
        f"{role}/lr": done[-1].stepped.lr,
        f"{role}/skipped_updates": float(sum(not u.stepped.is_applied for u in done)),
    }


def prepare_batch(learning: LearningContext, groups: Sequence[Group]) -> PackedBatch:
    """Pack the groups and compute the log-probs and values that the algorithm needs."""
    roles, needs = learning.roles, learning.rules.needs
    batch = pack_groups(
        groups,
        roles.device,
        with_rewards=needs.reward,
        replays_routes=needs.replays_routes,
    )
    with learning.phase("log-probs"):
        return compute_logprobs(batch, roles, needs)


def group_advantages(
    learning: LearningContext,
    batch: PackedBatch,
    groups: Sequence[Group],
    baselines: Mapping[str, float],
    *,
    kl_coef: float,
) -> BatchAdvantages:
    """Advantages of the batch; `baselines` are greedy rewards by group (ReMax)."""
    rollouts, device, needs = batch_order(groups), learning.roles.device, learning.rules.needs
    return compute_advantages(
        batch,
        learning.rules.advantage_config,
        kl_coef=kl_coef,
        baselines=_baseline_rewards(rollouts, baselines, device) if needs.baselines else None,
        components=_components(rollouts, device) if needs.components else None,
    )


def update_roles(
    learning: LearningContext,
    batch: PackedBatch,
    progress: RunProgress,
    *,
    before: BeforeUpdate | None = None,
) -> UpdateOutcome:
    """Update the critic, then the policy; waits for the outcome."""
    with learning.phase("update"):
        return start_update(learning, batch, progress, before=before).result()


def _baseline_rewards(
    rollouts: Sequence[Rollout], baselines: Mapping[str, float], device: torch.device
) -> Tensor:
    """Greedy reward of each rollout's group."""
    return torch.tensor([baselines[str(rollout.group)] for rollout in rollouts], device=device)


def _components(rollouts: Sequence[Rollout], device: torch.device) -> dict[str, Tensor]:
    """Reward components by name, one value per rollout."""
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        assert rollout.score is not None
        for part in rollout.score.parts:
            assert part.value is not None
            parts.setdefault(part.name, []).append(part.value)
    return {name: torch.tensor(values, device=device) for name, values in parts.items()}
