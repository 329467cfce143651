"""The self-test can fail, and says so."""

import torch

from luyen.models.random_policy import random_policy
from luyen.studio import selftest
from luyen.studio.selftest import exactness, random_numbers, same_answers

PROMPTS = [[(5 * i + n) % 128 for i in range(n)] for n in (1, 33, 70)]


def test_python_and_torch_draw_the_same_numbers() -> None:
    assert random_numbers().state == "ok"


def test_trainer_and_sampler_agree_on_random_weights() -> None:
    proof = exactness(random_policy(), PROMPTS, threads=1, rows=2, new=6)
    assert proof.state == "ok"
    assert "largest gap 0" in proof.detail
    assert torch.get_num_threads() == 1


def test_a_sampler_that_disagrees_fails_the_proof(monkeypatch) -> None:
    policy = random_policy()
    answers = selftest._answers

    def then_perturbed(*args, **kwargs):
        found = answers(*args, **kwargs)
        with torch.no_grad():
            next(policy.parameters())[3, 4] += 0.5
        return found

    monkeypatch.setattr(selftest, "_answers", then_perturbed)
    proof = exactness(policy, PROMPTS, threads=1, rows=2, new=6)
    assert proof.state == "failed"
    assert "approximate: gap" in proof.detail


def test_native_and_plain_generation_agree() -> None:
    proof = same_answers(random_policy(), PROMPTS, frozenset(), new=8)
    assert proof.state == "ok"
    assert "24 tokens, equal greedy tokens" in proof.detail


def test_the_same_seed_gives_the_same_random_model() -> None:
    first, again, other = (next(random_policy(seed=s).parameters()) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
