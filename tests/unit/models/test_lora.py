"""Adapters: what they train, switching them off, and reading them back."""

import json
from pathlib import Path

import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file

from luyen.base.errors import UserError
from luyen.config.schema.model import ModelConfig
from luyen.models.lora import adapter_off, adapter_state, add_adapter
from luyen.models.policy import Policy, _refuse_adapted_head
from tests.tiny_models import tiny_net

TOKENS, MASK = torch.arange(3, 20), torch.arange(17) > 0


def adapted(*, seed: int = 0, **options) -> Policy:
    net = tiny_net()
    add_adapter(net, ModelConfig(lora_rank=4, **options), seed=seed)
    return Policy(net, vocabulary=61).eval()


def logp(policy: Policy) -> torch.Tensor:
    return policy(TOKENS, [17], MASK).logp.detach()


def disturb(policy: Policy) -> None:
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)


def test_a_fresh_adapter_changes_nothing_and_alone_is_trained():
    policy = adapted()
    assert torch.equal(logp(policy), logp(Policy(tiny_net(), vocabulary=61)))
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    # Every linear layer but the output: 4 of attention and 3 of the feed-forward part, twice.
    assert len(trained) == 2 * 7 * 2


def test_the_seed_decides_the_fresh_weights():
    first, same, other = (adapter_state(adapted(seed=s).model) for s in (1, 1, 2))
    torch.manual_seed(5)
    before = torch.rand(1)
    torch.manual_seed(5)
    adapted(seed=3)
    name = next(n for n in first if "lora_A" in n)
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), before)


@pytest.mark.parametrize("names", [("all-linear",), ("q_proj", "down_proj")])
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_and_routers_of_a_mixture_get_no_adapter(kind: str, names: tuple[str, ...]):
    net = tiny_net(kind)
    add_adapter(net, ModelConfig(lora_rank=4, target_modules=names))
    adapted = {name.rpartition(".lora_A")[0] for name in adapter_state(net) if "lora_A" in name}
    assert any(name.endswith("q_proj") for name in adapted)
    assert not any(name.endswith((".gate", ".experts")) for name in adapted)
    policy = Policy(net, vocabulary=61).eval()
    assert torch.equal(logp(policy), logp(Policy(tiny_net(kind), vocabulary=61)))
    disturb(policy)
    assert not torch.equal(logp(policy), logp(Policy(tiny_net(kind), vocabulary=61)))


def test_adapter_off_is_the_model_below_and_is_undone():
    policy = adapted()
    disturb(policy)
    on = logp(policy)
    trained = [p.requires_grad for p in policy.parameters()]
    with adapter_off(policy):
        off = logp(policy)
    assert torch.equal(off, logp(Policy(tiny_net(), vocabulary=61)))
    assert not torch.equal(off, on)
    assert torch.equal(logp(policy), on)
    assert [p.requires_grad for p in policy.parameters()] == trained


def test_adapter_off_is_undone_after_an_error():
    policy = adapted()
    disturb(policy)
    on = logp(policy)
    with pytest.raises(RuntimeError, match="in between"), adapter_off(policy):
        raise RuntimeError("in between")
    assert torch.equal(logp(policy), on)


def test_a_model_without_an_adapter_has_none_to_switch_off():
    with pytest.raises(AssertionError, match="no adapter"), adapter_off(tiny_net()):
        pass


@pytest.mark.parametrize("alpha", [0.5, 16.0, 24.5])
def test_the_scale_is_alpha_over_rank(alpha: float):
    policy = adapted(lora_alpha=alpha)
    layer = next(m for m in policy.modules() if isinstance(m, LoraLayer))
    assert layer.scaling["default"] == alpha / 4


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_an_adapter_is_read_back(tmp_path: Path, prefix: str):
    policy = adapted()
    disturb(policy)
    held = {f"{prefix}{n}": t.contiguous() for n, t in adapter_state(policy.model).items()}
    save_file(held, tmp_path / "adapter_model.safetensors")
    again = adapted(seed=9, lora_adapter_path=str(tmp_path))
    assert torch.equal(logp(again), logp(policy))


def saved_adapter(folder: Path, **options) -> None:
    held = {n: t.contiguous() for n, t in adapter_state(adapted(**options).model).items()}
    save_file(held, folder / "adapter_model.safetensors")


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"adapter_model\.safetensors: it is not there"):
        adapted(lora_adapter_path=str(tmp_path))
    saved_adapter(tmp_path, target_modules=("q_proj",))
    with pytest.raises(UserError, match="24 of its weights do not fit"):
        adapted(lora_adapter_path=str(tmp_path))
    saved_adapter(tmp_path)
    net = tiny_net()
    with pytest.raises(UserError, match=r"is \[4, 96\], and the run has lora_rank 8"):
        add_adapter(net, ModelConfig(lora_rank=8, lora_adapter_path=str(tmp_path)))


def test_another_alpha_than_the_adapter_was_trained_with_is_refused(tmp_path: Path):
    saved_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 32}))
    with pytest.raises(UserError, match="was trained with 32"):
        adapted(lora_adapter_path=str(tmp_path))
    assert adapted(lora_alpha=32.0, lora_adapter_path=str(tmp_path)) is not None


def test_an_adapter_of_the_output_layer_is_refused_on_a_gpu():
    net = tiny_net()
    add_adapter(net, ModelConfig(lora_rank=4, target_modules=("lm_head",)))
    output = net.get_output_embeddings()
    _refuse_adapted_head(output, torch.device("cpu"))
    with pytest.raises(UserError, match="leave lm_head out"):
        _refuse_adapted_head(output, torch.device("cuda"))
