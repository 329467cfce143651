"""Scores of given tokens: the trainer's to the bit, however prompts are batched."""

import pytest
import torch

from luyen.base.errors import UserError
from luyen.rollout import prompt_scores
from luyen.rollout.native.sampler import TopTokens
from luyen.rollout.prompt_scores import prompt_logps
from luyen.rollout.protocol import generate
from tests.generation import native, plain_logits, prompt, request
from tests.tiny_models import VOCABULARY, tiny_policy

LENGTHS = (5, 1, 33, 2, 70, 5)
PROMPTS = [prompt(length, seed=i) for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=["llama", "qwen3", "cohere2"])
def policy(request: pytest.FixtureRequest):
    return tiny_policy(request.param)


def test_they_are_the_bits_of_the_trainer(policy):
    tokens = torch.tensor([token for one in PROMPTS for token in one])
    mask = torch.tensor([i > 0 for one in PROMPTS for i in range(len(one))])
    trained = policy(tokens, LENGTHS, mask).logp.tolist()
    found = prompt_logps(policy, PROMPTS)
    assert [one.logps[0] for one in found] == [None] * len(PROMPTS)
    assert [len(one.logps) for one in found] == list(LENGTHS)
    assert [logp for one in found for logp in one.logps[1:]] == trained
    assert {one.top_logps for one in found} == {()}


def test_they_are_the_bits_of_the_sampler(policy):
    asked = [request(n, 20, samples=2) for n in (3, 40)]
    for (name, _), done in generate(native(policy), asked).items():
        before = next(r.tokens for r in asked if r.id == name)
        [scored] = prompt_logps(policy, [before + done.tokens])
        assert scored.logps[len(before) :] == done.logps


@pytest.mark.parametrize("top", [0, 1, 7, 20])
def test_they_agree_with_a_plain_forward(policy, top: int):
    for one, scored in zip(PROMPTS, prompt_logps(policy, PROMPTS, top=top), strict=True):
        logps = torch.log_softmax(plain_logits(policy, one), -1)
        for place in range(1, len(one)):
            row = logps[place - 1]
            assert scored.logps[place] == pytest.approx(float(row[one[place]]), abs=1e-5)
            if top:
                best = scored.top_logps[place]
                assert best is not None
                assert [logp for _, logp in best] == pytest.approx(
                    row.topk(top).values.tolist(), abs=1e-5
                )
                assert dict(best).get(one[place], scored.logps[place]) == scored.logps[place]
        assert len(scored.top_logps) == (len(one) if top else 0)
        assert scored.top_logps[:1] == ((None,) if top else ())


def test_how_prompts_are_batched_changes_nothing(policy, monkeypatch):
    whole = prompt_logps(policy, PROMPTS, top=3)
    assert [prompt_logps(policy, [one], top=3)[0] for one in PROMPTS] == whole
    monkeypatch.setattr(prompt_scores, "_TOKENS_AT_ONCE", 40)
    monkeypatch.setattr(prompt_scores, "_LOGITS_AT_ONCE", 3 * VOCABULARY)
    assert prompt_logps(policy, PROMPTS, top=3) == whole


def test_nothing_to_score_needs_no_pass(policy):
    assert prompt_logps(policy, []) == []
    [scored] = prompt_logps(policy, [[4]], top=2)
    assert (scored.logps, scored.top_logps) == ((None,), (None,))


@pytest.mark.parametrize("bad", [[], [VOCABULARY], [3, -1]])
def test_an_impossible_prompt_is_named(policy, bad):
    with pytest.raises(UserError, match=r"tokens\[1\]"):
        prompt_logps(policy, [[1, 2], bad])
    with pytest.raises(UserError, match="at most 20"):
        prompt_logps(policy, [[1, 2]], top=21)


def test_likeliest_tokens_follow_other_numbers():
    ids, first = torch.tensor([[7, 2, 5]]), torch.tensor([[-1.0, -1.5, -1.6]])
    found = TopTokens(ids=ids, logps=first).with_logps(torch.tensor([[-1.25, -1.0, -1.25]]))
    assert (found.ids.tolist(), found.logps.tolist()) == ([[2, 5, 7]], [[-1.0, -1.25, -1.25]])
