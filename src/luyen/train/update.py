"""The optimizer steps of one training step: the critic first, then the policy."""

from collections.abc import Sequence
from dataclasses import replace

from luyen.algorithms.value import explained_variance
from luyen.base.errors import UserError
from luyen.base.seeds import derive_key
from luyen.engine.batch import PackedBatch
from luyen.engine.optim import rate
from luyen.engine.step import Updated
from luyen.train.plan import mini_batches
from luyen.train.run import OnlineRun

_MOST_SKIPPED = 3


def update_critic(run: OnlineRun, batch: PackedBatch, step: int) -> dict[str, float]:
    """All optimizer steps of the critic; nothing without one."""
    if run.roles.critic is None:
        return {}
    critic, actor = run.config.critic, run.config.actor_rollout_ref.actor
    lr = rate(critic.optim, step=step - 1, total_steps=run.total_steps)
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
    return _joined(done, "critic") | found


def update_actor(run: OnlineRun, batch: PackedBatch, step: int) -> dict[str, float]:
    """All optimizer steps of the policy; nothing while the critic warms up."""
    actor, trainer = run.config.actor_rollout_ref.actor, run.config.trainer
    if step <= trainer.critic_warmup:
        return {}
    lr = rate(actor.optim, step=step - 1, total_steps=run.total_steps)
    parts = mini_batches(
        batch,
        groups=actor.ppo_mini_batch_size,
        epochs=actor.ppo_epochs,
        shuffle=actor.shuffle,
        seed=run.seed,
        step=step,
    )
    done: list[Updated] = []
    for index, part in enumerate(parts):
        objective = replace(run.objective, entropy_coeff=run.entropy_coeff())
        seed = derive_key(run.seed, "selection", step, index) >> 1
        with run.profiler.part("update actor"):
            done.append(run.roles.update_actor(part, objective, lr=lr, seed=seed))
        run.follow_entropy(done[-1].metrics["actor/entropy"])
    _refuse_endless_skips(run, done)
    return _joined(done, "actor")


def _refuse_endless_skips(run: OnlineRun, done: Sequence[Updated]) -> None:
    """A gradient that is not finite is skipped; several in a row mean that training is broken."""
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


def _joined(done: Sequence[Updated], role: str) -> dict[str, float]:
    """Means over the optimizer steps of a step."""
    names = {name for updated in done for name in updated.metrics}
    found = {n: sum(u.metrics[n] for u in done) / len(done) for n in sorted(names)}
    norms = [updated.stepped.grad_norm for updated in done]
    return {
        **found,
        f"{role}/grad_norm": sum(norms) / len(norms),
        f"{role}/lr": done[-1].stepped.lr,
        f"{role}/skipped_updates": float(sum(not u.stepped.is_applied for u in done)),
    }
