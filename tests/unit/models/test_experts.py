"""Routed layers: the numbers of transformers, the bits of a token whatever else is in the batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from luyen.base import process_setup
from luyen.config.catalog import ROUTED_MODELS
from luyen.models import batch_invariant_linear, experts
from luyen.models.batch_invariant_linear import few_rows_linear
from luyen.models.experts import RoutingLog, route, routed_layers
from luyen.models.export import export_model
from luyen.models.hf_generation import hf_attention
from luyen.models.policy import Policy
from tests.tiny_models import VOCABULARY, read_net, tiny_net, tiny_policy

MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {},
    "qwen2_moe, weights divided by their sum": {"norm_topk_prob": True},
    "qwen2_moe, every second layer": {"decoder_sparse_step": 2},
    "qwen3_moe": {},
    "qwen3_moe, weights as they are": {"norm_topk_prob": False},
    "qwen3_moe, a dense layer first": {"mlp_only_layers": [0]},
    "mixtral, one expert a token": {"num_experts_per_tok": 1},
    "mixtral, router logits asked for": {"output_router_logits": True},
}
TOKENS = torch.randint(3, 60, (40,), generator=torch.Generator().manual_seed(1))
LENGTHS = (17, 23)
MASK = torch.tensor([i not in (0, 17) for i in range(40)])


def policy_of(name: str, **changes: Any) -> Policy:
    return tiny_policy(name.partition(",")[0], **MODELS[name], **changes)


def plain_logps(net: Any) -> Tensor:
    """Log-probabilities of all tokens but the first of each sequence, by transformers alone."""
    found: list[Tensor] = []
    for part in TOKENS.split(LENGTHS):
        logits = net(input_ids=part[None], use_cache=False).logits[0, :-1, :VOCABULARY]
        found.append(logits.log_softmax(-1).gather(-1, part[1:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_numbers_and_gradients_are_those_of_transformers(name: str, is_checkpointed: bool):
    policy = policy_of(name, initializer_range=0.1)
    net = tiny_net(name.partition(",")[0], **MODELS[name], initializer_range=0.1)
    net.set_experts_implementation("eager")
    if is_checkpointed:
        policy.train().model.gradient_checkpointing_enable({"use_reentrant": False})
    weights = torch.arange(38.0).cos()
    ours, theirs = policy(TOKENS, LENGTHS, MASK).logp, plain_logps(net)
    assert theirs.std() > 0.3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    (weights * ours).sum().backward()
    (weights * theirs).sum().backward()
    learned = dict(policy.model.named_parameters())
    assert any("experts.gate_up_proj" in key for key in learned)
    for key, parameter in net.named_parameters():
        assert parameter.grad is not None
        assert learned[key].grad is not None
        torch.testing.assert_close(learned[key].grad, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ROUTED_MODELS)
def test_transformers_reads_an_exported_mixture(kind: str, tmp_path: Path):
    policy = tiny_policy(kind, initializer_range=0.1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01)
        export_model(policy, tmp_path, stop_ids=frozenset({2}))
        theirs = plain_logps(read_net(tmp_path))
        ours = policy(TOKENS, LENGTHS, MASK).logp
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    again = read_net(tmp_path).state_dict()
    for name, weight in policy.model.state_dict().items():
        assert torch.equal(again[name], weight)


@pytest.mark.skipif(not process_setup.is_promised("float32"), reason="nothing is promised here")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ROUTED_MODELS)
def test_a_row_has_the_same_bits_among_any_others(kind: str, threads: int):
    torch.set_num_threads(threads)
    try:
        layer: Any = routed_layers(tiny_policy(kind).model)[0]
        x = torch.randn(1, 601, 64, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            whole = layer(x)
            for count in (1, 2, 3, 8, 33, 64, 257):
                assert torch.equal(layer(x[:, :count]), whole[:, :count])
                assert torch.equal(layer(x[:, -count:]), whole[:, -count:])
            mixed = torch.randperm(601, generator=torch.Generator().manual_seed(3))
            assert torch.equal(layer(x[:, mixed]), whole[:, mixed])
    finally:
        torch.set_num_threads(1)


def test_equally_likely_experts_are_taken_in_their_order():
    found = route(torch.tensor([[0.0] * 70, [0.0] * 60 + [1.0] * 10]), 3)
    assert found.experts.tolist() == [[0, 1, 2], [60, 61, 62]]
    torch.testing.assert_close(found.probability.sum(-1), torch.ones(2))
    layer: Any = routed_layers(tiny_policy("mixtral").model)[0]
    layer.gate.weight.data.zero_()
    log = RoutingLog()
    vars(layer)[experts.ROUTING] = (log, 0)
    layer(torch.randn(1, 5, 64))
    assert log.counts().tolist() == [[5, 5, 0, 0]]


def test_few_rows_take_the_batch_invariant_product(monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    product = few_rows_linear

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        sizes.append(len(x))
        return product(x, weight, bias)

    layer: Any = routed_layers(tiny_policy("mixtral").model)[0]
    x = torch.randn(1, 1, 64)
    expected = layer(x)
    monkeypatch.setattr(batch_invariant_linear, "few_rows_linear", noted)
    monkeypatch.setattr(batch_invariant_linear, "least_rows", lambda: 2)
    monkeypatch.setattr(batch_invariant_linear, "is_promised", lambda name: name == "float32")
    torch.testing.assert_close(layer(x), expected)
    assert sizes == [1] * 5, "the router, and both products of both experts"


def test_transformers_finds_the_logits_of_routers():
    changes = {"output_router_logits": True, "initializer_range": 0.1}
    net: Any = tiny_net("mixtral", **changes)
    policy = tiny_policy("mixtral", **changes)
    with torch.no_grad(), hf_attention(policy):
        ours, theirs = (model(TOKENS[None]) for model in (policy.model, net))
    torch.testing.assert_close(ours.aux_loss, theirs.aux_loss)
    assert len(ours.router_logits) == 2
    torch.testing.assert_close(ours.router_logits, theirs.router_logits, rtol=1e-4, atol=1e-5)


def test_other_mixtures_keep_their_own_forward():
    assert routed_layers(tiny_policy("gpt_oss").model) == []
    assert routed_layers(tiny_policy("llama").model) == []
    assert len(routed_layers(policy_of("qwen3_moe, a dense layer first").model)) == 1


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_the_log_counts_every_token_of_every_sequence(is_checkpointed: bool):
    policy = tiny_policy("qwen3_moe").train()
    if is_checkpointed:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    prompt, answers = TOKENS[:7], TOKENS[7:].split((20, 13))
    tokens = torch.cat([prompt, answers[0], prompt, answers[1]])
    lengths, mask = (27, 20), torch.tensor([i % 27 >= 7 for i in range(47)])
    found: dict[bool, RoutingLog] = {}
    for is_shared in (True, False):
        found[is_shared] = RoutingLog()
        policy(tokens, lengths, mask, is_shared=is_shared, routing=found[is_shared])
    shared, apart = found[True], found[False]
    assert shared.counts().sum(1).tolist() == [3 * 47] * 2
    assert torch.equal(shared.counts(), apart.counts())
    torch.testing.assert_close(shared.probability(), apart.probability())
    before = shared.counts()
    shared.probability()[0].backward()
    assert torch.equal(shared.counts(), before), "layers computed again add nothing"
    gate: Any = routed_layers(policy.model)[0]
    assert gate.gate.weight.grad.abs().sum() > 0
    # A call without a log leaves the old one alone.
    policy(tokens, lengths, mask)
    assert torch.equal(shared.counts(), before)
    assert policy.is_routed
    assert not tiny_policy("llama").is_routed
