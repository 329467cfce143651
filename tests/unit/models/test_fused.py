"""A fused model is the Hugging Face model: values, gradients, names and files."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file
from torch import Tensor, nn

from luyen.checkpoint.tensors import load_state, save_state
from luyen.models.fused.ops import gated, reference_gated
from luyen.models.fused.packed_linear import pack_linear
from luyen.models.fused.patch import FusedReport, fuse_layers
from luyen.models.policy import Policy
from luyen.models.weights import restore_parameters, trained_parameters
from tests.tiny_models import VOCABULARY, tiny_net

LENGTHS = [7, 19, 12]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied, gelu": ("llama", {"tie_word_embeddings": True, "hidden_act": "gelu"}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}),
    "gemma2": ("gemma2", {}),
    "gemma3_text": ("gemma3_text", {}),
    "gpt_oss": ("gpt_oss", {}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"residual_multiplier": 0.5}),
    "cohere2": ("cohere2", {}),
    "gpt_neox": ("gpt_neox", {}),
}


def disturbed(net: nn.Module) -> nn.Module:
    """Weights that start as ones or zeros become random: a mistake in them would not show."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return net


def pair(case: str) -> tuple[Policy, Policy, FusedReport]:
    """A policy, the same policy fused, and what was fused."""
    kind, changes = CASES[case]
    made = [disturbed(tiny_net(kind, **changes)) for _ in range(2)]
    plain, fused = (Policy(net, vocabulary=VOCABULARY).eval() for net in made)
    return plain, fused, fuse_layers(fused.model)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    tokens = torch.randint(3, VOCABULARY, (sum(LENGTHS),))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[[0, 7, 26]] = False
    return tokens, mask


def logp(policy: Policy) -> Tensor:
    tokens, mask = batch()
    return policy(tokens, LENGTHS, mask).logp


def gradients(policy: Policy) -> dict[str, Tensor]:
    policy.zero_grad(set_to_none=True)
    value = logp(policy)
    (value * torch.linspace(-1, 1, value.numel())).mean().backward()
    return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}


def assert_same(plain: Policy, fused: Policy) -> None:
    with torch.no_grad():
        torch.testing.assert_close(logp(fused), logp(plain), atol=1e-5, rtol=1e-5)
    ours, theirs = gradients(fused), gradients(plain)
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_a_fused_model_has_the_values_and_gradients_of_the_plain_one(case: str):
    plain, fused, _ = pair(case)
    assert_same(plain, fused)


@pytest.mark.parametrize("case", CASES)
def test_values_are_the_same_with_and_without_gradients(case: str):
    _, fused, _ = pair(case)
    with torch.no_grad():
        carried = logp(fused)
    assert torch.equal(carried, logp(fused).detach())


def test_the_report_says_what_was_fused_and_why_the_rest_was_not():
    _, _, report = pair("llama")
    fused = {"LlamaRMSNorm": 5, "LlamaMLP": 2, "LlamaAttention": 2, "LlamaDecoderLayer": 2}
    assert report == FusedReport(fused=fused, kept={}, unpacked={})
    _, _, report = pair("gpt_oss")
    assert report.fused == {"GptOssRMSNorm": 5, "GptOssAttention": 2}
    assert report.kept.keys() == {"GptOssMLP", "GptOssDecoderLayer"}
    _, _, report = pair("olmo2")
    assert report.fused == {"Olmo2RMSNorm": 9, "Olmo2MLP": 2}
    assert report.kept.keys() == {"Olmo2Attention", "Olmo2DecoderLayer"}


def test_an_unknown_activation_keeps_its_mlp():
    net = tiny_net("llama", hidden_act="relu")
    policy = Policy(net, vocabulary=VOCABULARY)
    assert fuse_layers(policy.model).kept == {
        "LlamaMLP": "no fused function for the activation ReLU"
    }


def test_fusing_twice_changes_nothing():
    plain, fused, _ = pair("qwen3")
    assert fuse_layers(fused.model).fused == {}
    assert_same(plain, fused)


def test_parameters_keep_their_names_their_objects_and_their_values():
    net = tiny_net("qwen2")
    before = dict(net.named_parameters())
    values = {name: p.detach().clone() for name, p in before.items()}
    fuse_layers(Policy(net, vocabulary=VOCABULARY).model)
    after = dict(net.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert all(torch.equal(after[name], values[name]) for name in before)


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma3_text"])
def test_adapters_stay_in_use_and_their_projections_are_not_packed(case: str):
    kind, changes = CASES[case]
    policies: list[Policy] = []
    for _ in range(2):
        net = disturbed(tiny_net(kind, **changes)).requires_grad_(False)
        config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        torch.manual_seed(3)
        policies.append(Policy(inject_adapter_in_model(config, net), vocabulary=VOCABULARY).eval())
    report = fuse_layers(policies[1].model)
    assert len(report.unpacked) == 4
    assert_same(*policies)
    assert any("lora" in name for name in gradients(policies[1]))


@pytest.mark.parametrize("frozen", ["k_proj", "proj", "mlp", "norm"])
def test_frozen_parameters_get_no_gradient(frozen: str):
    plain, fused, _ = pair("qwen3")
    for policy in (plain, fused):
        for name, parameter in policy.named_parameters():
            parameter.requires_grad_(frozen not in name)
    assert_same(plain, fused)


def test_checkpointed_layers_have_the_same_gradients():
    plain, fused, _ = pair("llama")
    fused.model.gradient_checkpointing_enable({"use_reentrant": False})
    fused.train()
    assert_same(plain, fused)


def test_an_optimizer_step_moves_the_packed_weights():
    plain, fused, _ = pair("llama with biases")
    for policy in (plain, fused):
        gradients(policy)
        torch.optim.SGD(policy.parameters(), lr=0.1).step()
    assert_same(plain, fused)


def test_a_deep_copy_is_on_its_own():
    _, fused, _ = pair("llama")
    before = logp(fused).detach()
    other = copy.deepcopy(fused)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    assert torch.equal(logp(fused), before)
    assert not torch.equal(logp(other), before)
    plain, _, _ = pair("llama")
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.5)
    assert_same(plain, other)


def test_another_type_is_packed_anew():
    _, fused, _ = pair("qwen2")
    before = logp(fused).detach()
    fused.double()
    torch.testing.assert_close(logp(fused).float().detach(), before, atol=1e-4, rtol=1e-4)


def test_a_fused_model_is_saved_and_loaded_like_a_plain_one(tmp_path):
    plain, fused, _ = pair("llama")
    for name, policy in (("plain", plain), ("fused", fused)):
        policy.model.save_pretrained(tmp_path / name)
        save_state(tmp_path, f"{name}_state", trained_parameters(policy))
    for file in ("model.safetensors",):
        left, right = (load_file(tmp_path / name / file) for name in ("plain", "fused"))
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
    folders = [tmp_path / f"{name}_state" for name in ("plain", "fused")]
    sizes = {sum(file.stat().st_size for file in folder.iterdir()) for folder in folders}
    assert len(sizes) == 1
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.zero_()
    restore_parameters(fused, load_state(tmp_path, "plain_state"))
    assert_same(plain, fused)


@pytest.mark.parametrize("case", ["llama", "qwen3", "smollm3", "gemma3_text", "gpt_oss"])
def test_a_fused_model_still_generates_with_a_cache_of_transformers(case: str):
    prompt = torch.tensor([[5, 9, 3, 17, 8, 30]])
    written: list[Tensor] = []
    for policy in pair(case)[:2]:
        policy.model.set_attn_implementation("eager")
        net: Any = policy.model
        options = {"do_sample": False, "min_new_tokens": 12, "max_new_tokens": 12}
        written.append(net.generate(prompt, attention_mask=torch.ones_like(prompt), **options))
    assert torch.equal(*written)
    assert written[0].numel() == 18


def test_packed_layers_are_the_layers_side_by_side():
    layers = [nn.Linear(6, n) for n in (4, 2, 2)]
    x = torch.randn(3, 5, 6)
    apart = torch.cat([layer(x) for layer in layers], -1)
    torch.testing.assert_close(pack_linear(layers)(x), apart)


def test_the_gate_is_the_first_half():
    x = torch.randn(3, 8)
    assert torch.equal(gated(x, "silu"), reference_gated(x[:, :4], x[:, 4:], "silu"))
