"""Rollouts become one packed batch: masks from provenance, rewards where their turns end."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from luyen.base.errors import UserError
from luyen.base.records import Rollout
from luyen.engine.batch import PackedBatch, flat_tensor, pack
from luyen.rollout.single_turn import Group
from luyen.telemetry.streams import IS_SAMPLED
from luyen.train.turn_rewards import placed_rewards


def in_order(groups: Sequence[Group]) -> list[Rollout]:
    """The rollouts in the order of the packed batch."""
    return sorted((r for g in groups for r in g.rollouts), key=lambda r: r.key)


def pack_groups(
    groups: Sequence[Group], device: torch.device | str = "cpu", *, is_judged: bool = True
) -> PackedBatch:
    """All rollouts, sorted by their address, with the log-probabilities they were drawn with.

    There are rewards beside them where they are judged.

    Sorting makes the batch independent of the order in which rollouts finished. Each branch of a
    rollout is a sequence; `PackedBatch.rollouts` puts them together again.
    """
    rollouts = in_order(groups)
    # A rollout has the streams of its last branch; `branches` would copy them.
    branches = [(i, part) for i, r in enumerate(rollouts) for part in (*r.earlier, r)]
    labels: dict[str, int] = {}
    masks = [bytes(branch.sources).translate(IS_SAMPLED) for _, branch in branches]
    batch = pack(
        [branch.tokens for _, branch in branches],
        masks=masks,
        groups=[labels.setdefault(str(rollouts[i].group), len(labels)) for i, _ in branches],
        device=device,
    )
    if not bool(batch.layout.mask.any()):
        raise UserError(
            "batch",
            f"{len(rollouts)} rollouts",
            "no token was sampled by the policy, so there is nothing to train on",
            "look at the rollouts of this step: are prompts cut, is max_response_length too small?",
        )
    logps = [0.0 if logp is None else logp for _, branch in branches for logp in branch.logps]
    turns = chain.from_iterable(branch.turns for _, branch in branches)
    batch = replace(batch, branch_of=tuple(i for i, _ in branches))
    batch = batch.with_streams(
        rollout_logp=flat_tensor(logps, torch.float32).to(device),
        turns=flat_tensor(turns, torch.int64).to(device),
    )
    if not is_judged:
        return batch
    return batch.with_streams(rewards=_rewards(rollouts, len(batch.tokens)).to(device))


def _rewards(rollouts: Sequence[Rollout], tokens: int) -> Tensor:
    """Reward of each token; most have none."""
    places: list[int] = []
    values: list[float] = []
    start = 0
    for rollout in rollouts:
        for place, reward in placed_rewards(rollout).items():
            places.append(start + place)
            values.append(reward)
        start += len(rollout.tokens)
        if rollout.earlier:
            start += sum(len(part.tokens) for part in rollout.earlier)
    rewards = torch.zeros(tokens)
    rewards[flat_tensor(places, torch.int64)] = flat_tensor(values, torch.float32)
    return rewards
