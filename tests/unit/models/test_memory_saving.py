"""Keys that save memory: the same gradients, from less that is kept between the passes."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from luyen.base.errors import UserError
from luyen.config.schema.model import ModelConfig, TiledMlpConfig
from luyen.models import offload
from luyen.models.load import load_policy
from luyen.models.offload import tile_feed_forward
from luyen.models.policy import Policy
from tests.tiny_models import VOCABULARY, tiny_net, tiny_policy

LENGTHS = (40, 33, 17, 60)
Found = tuple[Tensor, dict[str, Tensor]]


def loss_and_gradients(policy: Policy) -> Found:
    """Of a loss in which every token has a gradient of its own."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCABULARY, (sum(LENGTHS),), generator=generator)
    starts = torch.tensor([0, *LENGTHS[:-1]]).cumsum(0)
    mask = torch.ones(tokens.shape, dtype=torch.bool)
    mask[starts] = False
    policy.train()
    policy.zero_grad()
    scored = policy(tokens, LENGTHS, mask, entropy=True)
    loss = (scored.logp * torch.linspace(-1, 2, scored.logp.numel())).sum() + scored.entropy.sum()
    loss.backward()
    policy.eval()
    named = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return scored.logp.detach(), named


def checkpointed(policy: Policy) -> Policy:
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    return policy


def kept_bytes(policy: Policy, *, wider_than: int = 0) -> int:
    """Bytes that autograd keeps for the backward pass, of rows wider than so many numbers."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own and x.dim() and x.shape[-1] > wider_than:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    tokens = torch.randint(3, VOCABULARY, (64,), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(64) > 0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        held = policy(tokens, [64], mask)
    assert held.logp.requires_grad
    return sum(kept.values())


def near(found: Found, expected: Found) -> None:
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[1][name], gradient, atol=2e-6 * scale, rtol=0)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Tensors that were copied to the host, as if this were a GPU."""
    seen: list[Tensor] = []

    def worth(x: Tensor) -> bool:
        seen.append(x)
        return True

    monkeypatch.setattr(offload, "is_worth_moving", worth)
    return seen


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("prepared", [lambda p: p, checkpointed], ids=["plain", "checkpointed"])
def test_offloading_changes_no_bit(
    kind: str, prepared: Callable[[Policy], Policy], moved: list[Tensor]
):
    before = loss_and_gradients(prepared(tiny_policy(kind)))
    assert not moved
    policy = prepared(tiny_policy(kind))
    policy.is_offloading = True
    after = loss_and_gradients(policy)
    assert moved
    assert torch.equal(after[0], before[0])
    assert all(torch.equal(after[1][name], g) for name, g in before[1].items())


def test_weights_and_small_tensors_are_never_copied(monkeypatch: pytest.MonkeyPatch):
    copied: list[Tensor] = []
    original = offload._host_copy
    monkeypatch.setattr(offload, "is_worth_moving", lambda x: x.numel() >= 64)
    monkeypatch.setattr(offload, "_host_copy", lambda x: copied.append(x) or original(x))
    policy = tiny_policy()
    policy.is_offloading = True
    loss_and_gradients(policy)
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    assert copied
    assert all(x.numel() >= 64 for x in copied)
    assert not any(x.untyped_storage().data_ptr() in own for x in copied)


def test_where_layers_are_checkpointed_their_inputs_are_all_that_moves(moved: list[Tensor]):
    policy = checkpointed(tiny_policy())
    policy.is_offloading = True
    loss_and_gradients(policy)
    tokens, layers, hidden = sum(LENGTHS), 2, 64
    wide = [x for x in moved if x.is_floating_point() and x.numel() >= tokens * hidden]
    # The inputs of two layers, and what the last norm keeps.
    assert len(wide) <= layers + 4


def test_nothing_moves_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offload, "_SMALLEST", 0)
    monkeypatch.setattr(offload, "_host_copy", None)
    policy = tiny_policy()
    policy.is_offloading = True
    loss_and_gradients(policy)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi3", "gpt_neox"])
@pytest.mark.parametrize("slices", [1, 3, 4, 1000])
@pytest.mark.parametrize("prepared", [lambda p: p, checkpointed], ids=["plain", "checkpointed"])
def test_slices_give_the_same_scores_and_gradients(
    kind: str, slices: int, prepared: Callable[[Policy], Policy]
):
    before = loss_and_gradients(prepared(tiny_policy(kind)))
    policy = prepared(tiny_policy(kind))
    assert tile_feed_forward(policy.model, slices=slices) == 2
    after = loss_and_gradients(policy)
    assert torch.equal(after[0], before[0])
    near(after, before)


def test_slices_keep_nothing_of_the_inner_activation():
    policy = tiny_policy(intermediate_size=256)
    whole = kept_bytes(policy, wider_than=64)
    tile_feed_forward(policy.model, slices=4)
    # Gate, up, their product and the activation of two layers: 64 tokens x 256 numbers each.
    assert whole - kept_bytes(policy, wider_than=64) >= 2 * 3 * 64 * 256 * 4


def test_a_mixture_of_experts_is_not_sliced():
    with pytest.raises(UserError, match="experts"):
        tile_feed_forward(tiny_net("gpt_oss"), slices=2)
    with pytest.raises(UserError, match="no such layer"):
        tile_feed_forward(torch.nn.Linear(2, 2), slices=2)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite", "cohere2"])
def test_the_fused_head_gives_the_same_bits_and_keeps_no_logits(kind: str):
    policy = tiny_policy(kind)
    before, kept = loss_and_gradients(policy), kept_bytes(policy)
    policy.head = replace(policy.head, is_fused=True)
    after = loss_and_gradients(policy)
    assert torch.equal(after[0], before[0])
    near(after, before)
    # Two numbers a row are what it keeps instead of a row of logits.
    assert kept - kept_bytes(policy) >= 63 * (VOCABULARY - 2) * 4


def same(names: Sequence[str], policy: Policy) -> bool:
    return all("luyen_whole" in vars(dict(policy.model.named_modules())[n]) for n in names)


def test_the_keys_reach_the_policy():
    model = ModelConfig(
        enable_activation_offload=True,
        use_fused_kernels=True,
        tiled_mlp=TiledMlpConfig(enabled=True, num_shards=3),
        enable_gradient_checkpointing=False,
    )
    policy = load_policy(model, device="cpu", vocabulary=15)
    assert policy.is_offloading
    assert policy.head.is_fused
    names = [n for n, _ in policy.model.named_modules() if n.endswith(".mlp")]
    assert names
    assert same(names, policy)
    plain = load_policy(ModelConfig(), device="cpu", vocabulary=15)
    assert not plain.is_offloading
    assert not plain.head.is_fused
    assert not same(names, plain)
