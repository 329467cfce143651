"""An adapter of a reward model: what learns, and the model that has it merged."""

import pytest
import torch

from luyen.base.errors import UserError
from luyen.config.schema.model import ModelConfig
from luyen.engine.batch import pack
from luyen.models.reward_model import RewardModel, load_reward_model, merge_adapter

ROWS = [[3, 4, 5, 6], [3, 4, 7, 8, 9]]


def reward_model(*, rank: int, modules: tuple[str, ...] = ("all-linear",)) -> RewardModel:
    model = ModelConfig(
        path="builtin://arithmetic", lora_rank=rank, lora_alpha=8, target_modules=modules
    )
    return load_reward_model(model, device="cpu", field="path", new_head=3)


def scores(model: RewardModel) -> torch.Tensor:
    batch = pack(ROWS, masks=[[0, 0, *[1] * (len(row) - 2)] for row in ROWS], groups=[0, 0])
    with torch.no_grad():
        return model(batch.tokens, batch.lengths, batch.layout.mask)


def test_the_adapter_and_the_head_learn_and_nothing_else():
    names = [n for n, p in reward_model(rank=4).named_parameters() if p.requires_grad]
    assert "net.score.weight" in names
    assert all("lora_" in name for name in names if name != "net.score.weight")
    assert len(names) > 1


def test_a_merged_model_scores_as_the_one_with_the_adapter_does():
    adapted, plain = reward_model(rank=4), reward_model(rank=0)
    assert torch.equal(scores(adapted), scores(plain)), "a new adapter changes nothing"
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    wanted = scores(adapted)
    assert not torch.allclose(wanted, scores(plain), atol=1e-2)
    merge_adapter(adapted, plain)
    torch.testing.assert_close(scores(plain), wanted, rtol=1e-4, atol=1e-5)


def test_a_module_that_the_model_lacks_is_refused():
    with pytest.raises(UserError, match="no adapter can be put there"):
        reward_model(rank=4, modules=("nowhere",))
