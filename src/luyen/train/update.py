"""Learn from scored groups: batch, advantages, mini-batches, critic and actor updates."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, final

import torch
from torch import Tensor

from luyen.algorithms.value import explained_variance
from luyen.base.errors import UserError
from luyen.base.records import Rollout
from luyen.base.seeds import derive_key, shuffled
from luyen.engine.batch import PackedBatch
from luyen.engine.optim import learning_rate
from luyen.engine.step import UpdateResult
from luyen.rollout.single_turn import Group
from luyen.runtime.futures import PendingUpdate
from luyen.train.advantages import BatchAdvantages, compute_advantages
from luyen.train.batch import batch_order, compute_logprobs, pack_groups
from luyen.train.state import Learner

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


def update_critic(run: Learner, batch: PackedBatch, step: int) -> dict[str, float]:
    """Run all optimizer steps of the critic; no metrics where there is no critic."""
    if not run.roles.has_critic:
        return {}
    critic, actor = run.config.critic, run.config.actor_rollout_ref.actor
    lr = learning_rate(critic.optim, step=step - 1, total_steps=run.total_steps)
    parts = mini_batches(
        batch,
        groups=critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
        epochs=critic.ppo_epochs or actor.ppo_epochs,
        shuffle=actor.shuffle,
        seed=run.seed,
        step=step,
    )
    with run.profiler.part("update critic"):
        done = [run.roles.update_critic(part, lr=lr) for part in parts]
    streams = batch.streams
    explained = explained_variance(streams["values"], streams["returns"], batch.layout)
    found = {} if explained is None else {"critic/explained_variance": explained}
    return _mean_metrics(done, "critic") | found


def start_update(run: Learner, batch: PackedBatch, step: int) -> "StepUpdate":
    """Run all optimizer steps of the critic, then of the policy; the last is only started.

    During `critic_warmup` the policy is not updated.
    """
    critic = update_critic(run, batch, step)
    if step <= run.config.trainer.critic_warmup:
        return StepUpdate(run, batch, critic)
    return _start_actor(run, batch, step, StepUpdate(run, batch, critic))


def _start_actor(run: Learner, batch: PackedBatch, step: int, update: "StepUpdate") -> "StepUpdate":
    actor = run.config.actor_rollout_ref.actor
    lr = learning_rate(actor.optim, step=step - 1, total_steps=run.total_steps)
    parts = mini_batches(
        batch,
        groups=actor.ppo_mini_batch_size,
        epochs=actor.ppo_epochs,
        shuffle=actor.shuffle,
        seed=run.seed,
        step=step,
    )
    for index, (part, is_last) in enumerate(with_last(parts)):
        objective = replace(run.objective, entropy_coeff=run.entropy_coeff())
        seed = derive_key(run.seed, "selection", step, index) >> 1
        with run.profiler.part("update actor"):
            started = run.update_policy(part, objective, lr=lr, seed=seed, is_last=is_last)
            update.add(part, started)
            if not is_last:
                update.collect()
    return update


@final
class StepUpdate:
    """The optimizer steps of a training step; the last may still be in progress."""

    def __init__(self, run: Learner, batch: PackedBatch, critic: dict[str, float]) -> None:
        """`critic`: metrics of the critic's update."""
        self._run = run
        self._batch = batch
        self._critic = critic
        self._pending: tuple[PackedBatch, PendingUpdate] | None = None
        self._done: list[UpdateResult] = []

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
        self._run.follow_entropy(updated.metrics["actor/entropy"])
        if updated.logp is not None:
            self._run.trainer_logp = _in_batch_order(self._batch, part, updated.logp)

    def result(self) -> dict[str, float]:
        """Metrics of all optimizer steps; waits for the last."""
        self.collect()
        _refuse_endless_skips(self._run, self._done)
        return self._critic | (_mean_metrics(self._done, "actor") if self._done else {})


def _refuse_endless_skips(run: Learner, done: Sequence[UpdateResult]) -> None:
    """A UserError after several consecutive optimizer steps with non-finite gradients."""
    for updated in done:
        run.skipped = 0 if updated.stepped.is_applied else run.skipped + 1
    if run.skipped >= _MOST_SKIPPED:
        raise UserError(
            "actor/grad_norm",
            done[-1].stepped.grad_norm,
            f"the gradients of the last {run.skipped} optimizer steps were not finite and were not "
            "applied",
            "lower actor_rollout_ref.actor.optim.lr, and look at the rewards and log-probs of the "
            "last steps",
        )


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


def prepare_batch(run: Learner, groups: Sequence[Group]) -> PackedBatch:
    """Pack the groups and compute the log-probs and values that the algorithm needs."""
    batch = pack_groups(groups, run.roles.device, with_rewards=run.needs.reward)
    with run.phase("log-probs"):
        return compute_logprobs(batch, run.roles, run.needs)


def group_advantages(
    run: Learner, batch: PackedBatch, groups: Sequence[Group], baselines: Mapping[str, float]
) -> BatchAdvantages:
    """Advantages of the batch; `baselines` are greedy rewards by group (ReMax)."""
    rollouts, device = batch_order(groups), run.roles.device
    return compute_advantages(
        batch,
        run.advantage_config,
        kl_coef=run.kl_controller.kl_coef,
        baselines=_baseline_rewards(rollouts, baselines, device) if run.needs.baselines else None,
        components=_components(rollouts, device) if run.needs.components else None,
    )


def update_roles(run: Learner, batch: PackedBatch, step: int) -> dict[str, float]:
    """Update the critic, then the policy; waits, and returns the metrics."""
    with run.phase("update"):
        return start_update(run, batch, step).result()


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
