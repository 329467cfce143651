"""Scores of prompts on a GPU: the bits of the trainer and of the sampler, alternatives included."""

import pytest
import torch

from luyen.models.policy import Policy
from luyen.rollout.prompt_scores import prompt_logps
from luyen.rollout.protocol import generate
from tests.generation import native, prompt, request
from tests.tiny_models import VOCABULARY, tiny_net

pytestmark = pytest.mark.gpu

PROMPTS = [prompt(length, seed=length) for length in (5, 1, 70, 200)]


@pytest.fixture(params=["llama", "gemma2"])
def policy(request: pytest.FixtureRequest, device: str):
    return Policy(tiny_net(request.param).to(device), vocabulary=VOCABULARY).eval()


def test_they_are_the_bits_of_the_trainer(policy):
    tokens = torch.tensor([token for one in PROMPTS for token in one]).to(policy.device)
    mask = torch.tensor([i > 0 for one in PROMPTS for i in range(len(one))]).to(policy.device)
    trained = policy(tokens, [len(one) for one in PROMPTS], mask).logp.tolist()
    found = prompt_logps(policy, PROMPTS, top=7)
    assert [logp for one in found for logp in one.logps[1:]] == trained
    for one, scored in zip(PROMPTS, found, strict=True):
        for token, logp, top in zip(one[1:], scored.logps[1:], scored.top_logps[1:], strict=True):
            assert top is not None
            assert list(top) == sorted(top, key=lambda pair: (-pair[1], pair[0]))
            assert dict(top).get(token, logp) == logp


def test_they_are_the_bits_of_the_sampler(policy):
    asked = request(9, 40, samples=2, top_logprobs=5)
    for done in generate(native(policy), [asked]).values():
        [scored] = prompt_logps(policy, [asked.tokens + done.tokens], top=5)
        assert scored.logps[9:] == done.logps
        assert scored.top_logps[9:] == done.top_logps
