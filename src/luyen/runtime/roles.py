"""The roles the training loop calls, wherever they run, and the digests of their weights."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from luyen.algorithms.objective import Objective
from luyen.checkpoint.writer import CheckpointWriter
from luyen.engine.batch import PackedBatch
from luyen.engine.step import UpdateResult
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import PromptRequest
from luyen.runtime.futures import PendingUpdate, Publication, RolloutFuture
from luyen.runtime.generation import Generation
from luyen.runtime.monitoring import RoleMonitor, TraceTarget
from luyen.telemetry.journal import WorkJournal

_MOMENT = "exp_avg"


class WeightDigests(Protocol):
    """Type, shape and digest of every trained tensor of the roles, as one text per tensor.

    Computed on first read, then cached. Reading changes nothing; no role may be updated before
    both methods were called.
    """

    def weights(self) -> Mapping[str, str]:
        """Trained parameters, and their fp32 masters where they have any."""
        ...

    def moments(self) -> Mapping[str, str]:
        """First moments of the optimizers, which hold the gradients."""
        ...


def split_learned_state(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """First moments, and weights with masters, out of the roles' checkpoint state.

    A first moment holds the gradient of the step, which itself is cleared as soon as it is
    applied. The second moment holds the same once more, and would cost as much again.
    """
    moments: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for role, part in state.items():
        if "adamw" not in part:
            weights |= {f"{role}/{name}": tensor for name, tensor in part.items()}
            continue
        for index, kept in part["adamw"]["state"].items():
            moments[f"{role}/{index}/{_MOMENT}"] = kept[_MOMENT]
        weights |= {f"{role}/masters/{i}": t for i, t in enumerate(part["masters"])}
    return moments, weights


class Roles(Protocol):
    """Actor, rollout engine, reference, teacher and critic. Batches are whole, on `device`."""

    generation: Generation
    """Makes rollouts out of requests."""

    @property
    def device(self) -> torch.device:
        """The device that batches must be on."""
        ...

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic."""
        ...

    @property
    def watch(self) -> RoleMonitor | None:
        """The monitor of the roles' processes; None: all roles are in this process."""
        ...

    @property
    def generates_remotely(self) -> bool:
        """Whether submitted requests are generated while the caller continues."""
        ...

    @property
    def traces(self) -> TraceTarget | None:
        """Processes of the roles that can be traced; None: all roles are in this process."""
        ...

    def submit(
        self,
        requests: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> RolloutFuture:
        """Submit requests; engines in other processes start to generate at once.

        Rollouts are generated with exactly this version of the weights. It must have been
        published; if its publication is not complete, generation waits for it.
        """
        ...

    def publish(self, version: int) -> Publication:
        """Send the actor's weights to the rollout engines, as this version.

        Returns without waiting for the transfer. Engines drop earlier versions that
        `keep_weights` did not name.
        """
        ...

    def keep_weights(self, versions: Collection[int]) -> None:
        """Only these versions will be submitted again, besides those published later."""
        ...

    def old_scores(self, batch: PackedBatch, *, sum_pi_squared: bool) -> dict[str, Tensor]:
        """Log-probabilities under the weights that the update starts from."""
        ...

    def reference_logp(self, batch: PackedBatch) -> Tensor:
        """Log-probabilities under the reference policy."""
        ...

    def teacher_logp(self, batch: PackedBatch) -> Tensor:
        """Log-probabilities under the teacher."""
        ...

    def values(self, batch: PackedBatch) -> Tensor:
        """The critic's value before each token."""
        ...

    def update_actor(
        self,
        batch: PackedBatch,
        objective: Objective,
        *,
        lr: float,
        seed: int,
        is_last: bool = False,
    ) -> PendingUpdate:
        """Start one optimizer step of the policy; the handle returns its metrics.

        With `is_last`, workers gather their weights for publication right after the step.
        """
        ...

    def update_critic(self, batch: PackedBatch, *, lr: float) -> UpdateResult:
        """One optimizer step of the critic."""
        ...

    def weight_digests(self) -> WeightDigests:
        """Digests of every trained tensor, as it is now."""
        ...

    def not_finite(self) -> list[str]:
        """Names of the tensors of a checkpoint that hold NaN or infinity."""
        ...

    def save(
        self,
        writer: CheckpointWriter,
        step: int,
        *,
        loop: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint of weights, optimizer state and the loop's state."""
        ...

    def load(self, folder: Path) -> None:
        """Restore weights and optimizer state, whatever number of ranks saved them."""
        ...

    def close(self) -> None:
        """Release engines, tools, processes and devices."""
        ...
