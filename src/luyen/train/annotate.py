"""Add to a batch what the algorithm says it needs: log-probabilities of others, and values."""

import torch

from luyen.engine.actor import gap_metrics
from luyen.engine.batch import PackedBatch
from luyen.runtime.roles import Roles
from luyen.train.needs import Needs


def annotate(batch: PackedBatch, roles: Roles, needs: Needs) -> PackedBatch:
    """The batch with the streams of `needs`, all under the weights before the update."""
    streams = dict(batch.streams)
    if needs.old_logp == "compute" or needs.sum_pi_squared:
        scored = roles.old_scores(batch, sum_pi_squared=needs.sum_pi_squared)
        streams["old_logp"] = scored["logp"]
        if needs.sum_pi_squared:
            streams["sum_pi_squared"] = scored["sum_pi_squared"]
    if needs.old_logp == "rollout":
        streams["old_logp"] = streams["rollout_logp"]
    if needs.reference:
        streams["ref_logp"] = roles.reference_logp(batch)
    if needs.teacher:
        streams["teacher_logp"] = roles.teacher_logp(batch)
    if needs.values:
        streams["values"] = roles.values(batch)
    if needs.old_logp == "skip":
        # The update may shuffle; its forward pass is then put back in this order.
        streams["place"] = torch.arange(len(batch.tokens), device=batch.tokens.device)
    return batch.with_streams(**streams)


def parity_metrics(batch: PackedBatch, needs: Needs) -> dict[str, float]:
    """The gap between trainer and sampler, where old log-probabilities had their own pass.

    Where they had none, the update measures it in its own forward pass. In bypass mode the
    sampler's numbers stand in for the trainer's: nothing was measured, and nothing is said.
    """
    if needs.old_logp != "compute":
        return {}
    return gap_metrics(batch, batch.streams["old_logp"])
