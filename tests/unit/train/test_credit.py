"""What a step says about its groups."""

import torch

from luyen.engine.batch import pack
from luyen.train.advantages import AdvantageConfig, compute_advantages

RULES = AdvantageConfig(
    estimator="grpo",
    hparams={},
    is_group_relative=True,
    kl_kind="kl",
    correction=None,
)


def test_a_kl_term_in_the_reward_does_not_unsolve_an_answer():
    batch = pack([(5, 6, 7), (5, 8, 9)], masks=[[False, True, True]] * 2, groups=[0, 0])
    batch = batch.with_streams(
        rewards=torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 1.0]),
        rollout_logp=torch.tensor([0.0, -0.1, -0.2, 0.0, -0.3, -0.4]),
        ref_logp=torch.tensor([0.0, -0.5, -0.2, 0.0, -0.4, -0.4]),
    )
    found = compute_advantages(batch, RULES, kl_coef=0.1).metrics
    assert found["group/solve_all_fraction"] == 1.0
    assert found["group/solve_none_fraction"] == 0.0
    assert found["actor/ref_kl"] > 0
