"""Online DPO through the actor's engine: one plain step is a step on the DPO loss itself."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from luyen.algorithms.advantages import CreditInputs, adv_estimators
from luyen.algorithms.objective import Objective
from luyen.engine.actor import score
from luyen.engine.batch import MicroBatching, PackedBatch
from luyen.models.policy import Policy
from tests.tiny_models import tiny_policy
from tests.unit.engine.steps import PASSES, actor, recorded
from tests.unit.engine.test_updates import gradient

BETA = 0.3
REWARDS = (0.0, 1.0, 0.5, 2.0, 1.0, 1.0, 0.0, 0.0)
PAIRS = ((1, 0), (3, 4))
"""Best and worst of each group of the recorded batch; in the last group all are alike."""
STEP = Objective(loss="reinforce", aggregation="token-sum")


def sums(policy: Policy, batch: PackedBatch) -> Tensor:
    """Log-probability of each answer, with its gradient."""
    scored = policy(batch.tokens, batch.lengths, batch.layout.mask)
    return batch.layout.sum(batch.scatter(scored.logp))


def credited() -> PackedBatch:
    """The recorded batch with the advantages of its sampled pairs."""
    batch = recorded()
    policy, reference = tiny_policy(initializer_range=0.1), tiny_policy(seed=5)
    old = score(policy, batch, PASSES["by tokens"], temperature=1.0)["logp"]
    ref = score(reference, batch, PASSES["by tokens"], temperature=1.0)["logp"]
    last = batch.layout.offsets[1:] - 1
    rewards = torch.zeros(batch.tokens.shape).index_copy(0, last, torch.tensor(REWARDS))
    inputs = CreditInputs(rewards=rewards, layout=batch.layout, old_logp=old, ref_logp=ref)
    credit = adv_estimators.get("online_dpo")(inputs, beta=BETA)
    return batch.with_streams(advantages=credit.advantages, old_logp=old, ref_logp=ref)


@pytest.mark.parametrize("passes", PASSES.values(), ids=list(PASSES))
def test_the_gradient_is_that_of_the_dpo_loss(passes: MicroBatching):
    batch = credited()
    # Correction weights of the recorded batch would scale it.
    streams = {name: x for name, x in batch.streams.items() if name != "is_weights"}
    bare = PackedBatch(
        tokens=batch.tokens, lengths=batch.lengths, layout=batch.layout, streams=streams
    )
    found = gradient(actor(passes), lambda engine: engine.update(bare, STEP, lr=0.01, seed=0))
    policy, reference = tiny_policy(initializer_range=0.1), tiny_policy(seed=5)
    mine, fixed = sums(policy, batch), sums(reference, batch).detach()
    best, worst = ([pair[side] for pair in PAIRS] for side in (0, 1))
    gap = (mine - fixed)[best] - (mine - fixed)[worst]
    (-logsigmoid(BETA * gap)).mean().backward()
    expected = torch.cat(
        [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    ).double()
    assert expected.norm() > 1e-3
    assert (found - expected).norm() < 1e-5 * expected.norm()
