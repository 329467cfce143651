"""Computing a shared prompt once changes neither scores nor gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luyen.models.attention import AttentionWindow
from luyen.models.packed_attention import PackedContext, share_prompts
from luyen.models.policy import Policy
from tests.tiny_models import VOCABULARY, tiny_net

KINDS = ("llama", "gemma2", "gpt_oss", "mistral", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")


shapes = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


def batch(shape: list[tuple[int, list[int]]], seed: int):
    """Packed sequences: for each prompt length, answers of these lengths."""
    draw = torch.Generator().manual_seed(seed)
    tokens, lengths, mask = [], [], []
    for prompt, answers in shape:
        start = torch.randint(3, 60, (prompt,), generator=draw).tolist()
        for answer in answers:
            rest = torch.randint(3, 60, (answer,), generator=draw).tolist()
            tokens += start + rest
            lengths.append(prompt + answer)
            mask += [False] * prompt + [True] * answer
    return torch.tensor(tokens), lengths, torch.tensor(mask)


def scored(policy: Policy, parts, *, is_shared: bool):
    """Scores, and the gradient of a sum that weighs every token differently."""
    policy.zero_grad()
    found = policy(*parts, entropy=True, is_shared=is_shared)
    weights = torch.arange(found.logp.numel(), dtype=found.logp.dtype).cos()
    (weights * (found.logp + 0.1 * found.entropy)).sum().backward()
    gradients = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
    return found.logp.detach(), gradients


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_the_same_bits_and_gradients_differ_by_rounding(kind: str):
    policy = Policy(tiny_net(kind), vocabulary=VOCABULARY)
    parts = batch([(20, [5, 1, 9]), (7, [4]), (1, [6, 30]), (33, [2, 2, 2, 2])], seed=1)
    assert share_prompts(*parts).saved > 0.3
    shared, ours = scored(policy, parts, is_shared=True)
    apart, theirs = scored(policy, parts, is_shared=False)
    assert torch.equal(shared, apart)
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert float((mine - other).abs().max()) <= 1e-5 * float(other.abs().max()) + 1e-6


WINDOWS = (
    AttentionWindow(),
    AttentionWindow(sliding=4),
    AttentionWindow(softcap=5.0, sinks=torch.linspace(-1, 1, 4, dtype=torch.float64)),
)


@pytest.mark.parametrize("window", WINDOWS)
@settings(deadline=None, max_examples=20)
@given(shape=shapes, seed=st.integers(0, 1000))
def test_attention_and_its_gradients_in_double_precision(window, shape, seed):
    # Attention is the only place where tokens of a sequence meet: the rest works on each alone.
    tokens, lengths, mask = batch(shape, seed)
    sharing = share_prompts(tokens, lengths, mask)
    draw = torch.Generator().manual_seed(seed)
    count = sharing.first.numel()
    distinct = [
        torch.randn(count, heads, 8, dtype=torch.float64, generator=draw) for heads in (4, 2, 2)
    ]
    weights = torch.randn(tokens.numel(), 4, 8, dtype=torch.float64, generator=draw)

    def attended(*, is_shared: bool):
        leaves = [x.clone().requires_grad_() for x in distinct]
        laid = leaves if is_shared else [x[sharing.place] for x in leaves]
        context = PackedContext.of(lengths, sharing=sharing if is_shared else None)
        out = context.attend(0, *(x.transpose(0, 1)[None] for x in laid), 0.3, window)[0]
        whole = out[sharing.place] if is_shared else out
        (weights * whole).sum().backward()
        return whole.detach(), [leaf.grad for leaf in leaves]

    shared, ours = attended(is_shared=True)
    apart, theirs = attended(is_shared=False)
    torch.testing.assert_close(shared, apart, rtol=1e-12, atol=1e-12)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(shape=shapes, seed=st.integers(0, 1000))
def test_every_place_leads_to_its_own_token(shape, seed):
    tokens, lengths, mask = batch(shape, seed)
    found = share_prompts(tokens, lengths, mask)
    assert torch.equal(tokens[found.first][found.place], tokens)
    assert torch.equal(found.place[found.first], torch.arange(found.first.numel()))
    assert sum(found.own) == found.first.numel()
    # All places of a token: those that are listed, and one for every other token.
    counts = torch.bincount(found.place, minlength=found.first.numel())
    listed = torch.ones_like(counts)
    for distinct, places in found.copies:
        assert torch.equal(found.place[places], distinct[:, None].expand_as(places))
        listed[distinct] = places.shape[1]
    assert torch.equal(counts, listed)
    # Answers are never shared.
    assert counts[found.place[mask]].max() == 1
