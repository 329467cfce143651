"""Learning from groups that were judged, the same for a run and for its replay from files."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from luyen.base.records import Rollout
from luyen.engine.batch import PackedBatch
from luyen.rollout.single_turn import Group
from luyen.train.annotate import annotate
from luyen.train.credit import Credited, credit
from luyen.train.learning import Learning
from luyen.train.samples import in_order, pack_groups
from luyen.train.update import start_update


def annotated(run: Learning, groups: Sequence[Group]) -> PackedBatch:
    """The rollouts as one batch, with everything that the algorithm needs beside the tokens."""
    batch = pack_groups(groups, run.roles.device, is_judged=run.needs.reward)
    with run.phase("log-probs"):
        return annotate(batch, run.roles, run.needs)


def credit_groups(
    run: Learning, batch: PackedBatch, groups: Sequence[Group], baselines: Mapping[str, float]
) -> Credited:
    """Advantages of the batch; `baselines` are greedy rewards by group, where they are needed."""
    rollouts, device = in_order(groups), run.roles.device
    return credit(
        batch,
        run.credit_rules,
        kl_coef=run.kl_controller.kl_coef,
        baselines=_of_groups(rollouts, baselines, device) if run.needs.baselines else None,
        components=_components(rollouts, device) if run.needs.components else None,
    )


def update_roles(run: Learning, batch: PackedBatch, step: int) -> dict[str, float]:
    """The optimizer steps of the critic, then of the policy, and what they measured."""
    with run.phase("update"):
        return start_update(run, batch, step).result()


def _of_groups(
    rollouts: Sequence[Rollout], baselines: Mapping[str, float], device: torch.device
) -> Tensor:
    """The greedy reward that belongs to each rollout."""
    return torch.tensor([baselines[str(rollout.group)] for rollout in rollouts], device=device)


def _components(rollouts: Sequence[Rollout], device: torch.device) -> dict[str, Tensor]:
    """Named parts of the reward, one number per rollout."""
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        assert rollout.score is not None
        for part in rollout.score.parts:
            assert part.value is not None
            parts.setdefault(part.name, []).append(part.value)
    return {name: torch.tensor(values, device=device) for name, values in parts.items()}
