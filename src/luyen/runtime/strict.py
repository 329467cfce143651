"""Roles of this process behind the walls of a cluster: what goes in and out is pickled.

In one process a batch could hold what cannot travel, or a caller could lean on being handed the
very tensor it gave. On Ray neither works. Behind this wrapper neither works here.
"""

import pickle
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from luyen.algorithms.objective import Objective
from luyen.checkpoint.background import CheckpointWriter
from luyen.engine.batch import PackedBatch
from luyen.engine.step import Updated
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import Draw
from luyen.runtime.generation import Generation
from luyen.runtime.pending import CompletedUpdate, Pending, Publication
from luyen.runtime.roles import Described, Roles
from luyen.runtime.trace import Traced
from luyen.runtime.watch import RoleWatch
from luyen.telemetry.journal import WorkJournal

VARIABLE = "LUYEN_STRICT"
"""Set to 1, a run in one process is held to this."""
_Any = TypeVar("_Any")


def travelled(value: _Any) -> _Any:
    """The value as another process would be given it; a TypeError where it cannot travel.

    Example:
        >>> given = {"logp": torch.ones(2)}
        >>> arrived = travelled(given)
        >>> arrived["logp"].tolist(), arrived["logp"] is given["logp"]
        ([1.0, 1.0], False)
    """
    return pickle.loads(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


@final
class StrictRoles:
    """The roles it is given, reached as on a cluster: nothing is shared but what is written there.

    Conversations, journal and checkpoints stay on the controller's side on a cluster, too, and
    pass unchanged.
    """

    def __init__(self, inner: Roles) -> None:
        self.inner = inner
        self.generation: Generation = inner.generation

    @property
    def device(self) -> torch.device:
        """Where batches are to be."""
        return self.inner.device

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic."""
        return self.inner.has_critic

    @property
    def watch(self) -> RoleWatch | None:
        """What hears of the processes of the roles."""
        return self.inner.watch

    @property
    def draws_elsewhere(self) -> bool:
        """Whether what is submitted is drawn while the caller does something else."""
        return self.inner.draws_elsewhere

    @property
    def traces(self) -> Traced | None:
        """Processes of the roles that can be traced."""
        return self.inner.traces

    def submit(
        self,
        draws: Sequence[Draw],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> Pending:
        """Ask for rollouts of every draw."""
        return self.inner.submit(
            draws, travelled(sampling), purpose=purpose, version=version, journal=journal
        )

    def publish(self, version: int) -> Publication:
        """Send the actor's weights to the engines that generate, as this version."""
        return self.inner.publish(version)

    def keep_weights(self, versions: Collection[int]) -> None:
        """Only these versions will be submitted again, besides those published later."""
        self.inner.keep_weights(versions)

    def old_scores(self, batch: PackedBatch, *, sum_pi_squared: bool) -> dict[str, Tensor]:
        """Log-probabilities under the weights that the update starts from."""
        return travelled(self.inner.old_scores(travelled(batch), sum_pi_squared=sum_pi_squared))

    def reference_logp(self, batch: PackedBatch) -> Tensor:
        """Log-probabilities under the reference policy."""
        return travelled(self.inner.reference_logp(travelled(batch)))

    def teacher_logp(self, batch: PackedBatch) -> Tensor:
        """Log-probabilities under the teacher."""
        return travelled(self.inner.teacher_logp(travelled(batch)))

    def values(self, batch: PackedBatch) -> Tensor:
        """The critic's value before each token."""
        return travelled(self.inner.values(travelled(batch)))

    def update_actor(
        self,
        batch: PackedBatch,
        objective: Objective,
        *,
        lr: float,
        seed: int,
        is_last: bool = False,
    ) -> CompletedUpdate:
        """One optimizer step of the policy."""
        given = travelled((batch, objective))
        update = self.inner.update_actor(*given, lr=lr, seed=seed, is_last=is_last)
        return CompletedUpdate(travelled(update.result()))

    def update_critic(self, batch: PackedBatch, *, lr: float) -> Updated:
        """One optimizer step of the critic."""
        return travelled(self.inner.update_critic(travelled(batch), lr=lr))

    def describe(self) -> Described:
        """Digests of everything that learns, as it is now."""
        return self.inner.describe()

    def not_finite(self) -> list[str]:
        """Names of the tensors of a checkpoint that hold NaN or infinity."""
        return travelled(self.inner.not_finite())

    def save(
        self,
        writer: CheckpointWriter,
        step: int,
        *,
        loop: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> None:
        """Make a checkpoint of weights, optimizer state and the loop's own state."""
        self.inner.save(writer, step, loop=travelled(loop), facts=travelled(facts))

    def load(self, folder: Path) -> None:
        """Restore weights and optimizer state, whatever number of ranks saved them."""
        self.inner.load(travelled(folder))

    def close(self) -> None:
        """Free everything."""
        self.inner.close()
