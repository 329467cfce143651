"""The reward model on a GPU: the same bits in any batch, and weights that go and come back."""

import pytest
import torch

from luyen.models.reward_model import RewardModel
from luyen.rewards.reward_model import ModelInput
from luyen.runtime.reward_model import LocalScorer
from tests.tiny_models import tiny_judge_net

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def inputs() -> list[ModelInput]:
    """Answers of several lengths, some of which share their prompt."""
    made = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 60, (n,), generator=made).tolist() for n in (5, 70)]
    found: list[ModelInput] = []
    for prompt in prompts:
        for size in (1, 7, 64, 130):
            tokens = (*prompt, *torch.randint(1, 60, (size,), generator=made).tolist())
            found.append(ModelInput(tokens=tokens, prompt=len(prompt), judged=(len(tokens) - 1,)))
    return found


def scorer(dtype: torch.dtype, **changes) -> LocalScorer:
    net = tiny_judge_net(dtype=dtype).cuda()
    limits = {"max_tokens": 4096, "max_sequences": 64, **changes}
    return LocalScorer(RewardModel(net).eval(), **limits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_score_has_the_same_bits_in_any_batch(dtype: torch.dtype):
    whole = scorer(dtype).score(inputs())
    assert scorer(dtype, max_sequences=1).score(inputs()) == whole
    assert scorer(dtype, max_tokens=256).score(inputs()[::-1]) == whole[::-1]


def test_scores_are_those_of_transformers():
    net = tiny_judge_net().cuda()
    net.config.pad_token_id = None
    with torch.no_grad():
        expected = [float(net(torch.tensor([i.tokens]).cuda()).logits[0, 0]) for i in inputs()]
    found = [score for (score,) in scorer(torch.float32).score(inputs())]
    assert found == pytest.approx(expected, rel=1e-2, abs=1e-2)


def test_resting_weights_give_their_memory_back_and_return_to_the_bit():
    awake = scorer(torch.bfloat16).score(inputs())
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    resting = scorer(torch.bfloat16, is_resting=True)
    assert torch.cuda.memory_allocated() - before < 10_000
    for _ in range(2):
        assert resting.score(inputs()) == awake
        assert torch.cuda.memory_allocated() - before < 10_000
