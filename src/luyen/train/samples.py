"""Rollouts become one packed batch: masks from provenance, rewards on the last sampled token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from luyen.base.errors import UserError
from luyen.base.records import Rollout, Source
from luyen.engine.batch import PackedBatch, pack
from luyen.rollout.single_turn import Group


def pack_groups(groups: Sequence[Group], device: torch.device | str = "cpu") -> PackedBatch:
    """All rollouts, sorted by their address, with the log-probabilities they were drawn with.

    Sorting makes the batch independent of the order in which rollouts finished.
    """
    rollouts = sorted((r for g in groups for r in g.rollouts), key=lambda r: r.key)
    labels: dict[str, int] = {}
    batch = pack(
        [rollout.tokens for rollout in rollouts],
        masks=[[s == Source.SAMPLED for s in rollout.sources] for rollout in rollouts],
        groups=[labels.setdefault(str(r.group), len(labels)) for r in rollouts],
        device=device,
    )
    drawn = [0.0 if logp is None else logp for r in rollouts for logp in r.logps]
    if not bool(batch.layout.mask.any()):
        raise UserError(
            "batch",
            f"{len(rollouts)} rollouts",
            "no token was sampled by the policy, so there is nothing to train on",
            "look at the rollouts of this step: are prompts cut, is max_response_length too small?",
        )
    return batch.with_streams(
        rollout_logp=torch.tensor(drawn, dtype=torch.float32, device=device),
        rewards=_on_last(batch, torch.tensor([reward_of(r) for r in rollouts], device=device)),
    )


def reward_of(rollout: Rollout) -> float:
    """The judged value; a rollout without one must have been dropped before."""
    assert rollout.score is not None, "a rollout reached training without being judged"
    assert rollout.score.value is not None, "a rollout reached training without a score"
    return rollout.score.value


def _on_last(batch: PackedBatch, per_sequence: Tensor) -> Tensor:
    """One number a sequence as a stream, standing on its last trainable token."""
    layout, device = batch.layout, batch.tokens.device
    place = torch.arange(layout.mask.numel(), device=device)
    last = torch.full((layout.num_sequences,), -1, device=device).scatter_reduce(
        0, layout.segment, torch.where(layout.mask, place, -1), "amax"
    )
    stream = torch.zeros(layout.mask.shape, device=device)
    found = last >= 0
    stream[last[found]] = per_sequence[found].float()
    return stream
