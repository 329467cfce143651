"""4-bit weights: products, gradients, what is exported, and the planned bytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from luyen.config.loader.load import load
from luyen.config.loader.parse import parse
from luyen.config.machine import this_machine
from luyen.config.model_folder.config_json import shape_from
from luyen.config.model_memory import static_memory
from luyen.config.plan import plan_placement
from luyen.config.schema.model import ModelConfig
from luyen.models.export import checkpoint_tensors, export_merged
from luyen.models.lora import adapter_layers, adapter_off, add_adapter
from luyen.models.policy import Policy
from luyen.models.quantization import is_quantized, quantize, restored
from tests.tiny_models import tiny_net

TOKENS, MASK = torch.arange(3, 20), torch.arange(17) > 0
MODEL = "actor_rollout_ref.model"


def config(**options: Any) -> ModelConfig:
    return ModelConfig(quantization="nf4", lora_rank=4, **options)


def quantised(kind: str = "llama", **options: Any) -> Policy:
    net = tiny_net(kind)
    model = config(**options)
    quantize(net, model, torch.device("cpu"))
    add_adapter(net, model)
    return Policy(net, vocabulary=61).eval()


def logp(policy: Policy) -> torch.Tensor:
    return policy(TOKENS, [17], MASK).logp


def disturb(policy: Policy) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def whole(policy: Policy) -> nn.Module:
    """A plain model with the restored weights, and the adapter added in float32."""
    net = tiny_net()
    layers = adapter_layers(policy.model)
    with torch.no_grad():
        for name, layer in policy.model.named_modules():
            if is_quantized(layer):
                below = net.get_submodule(name.removesuffix(".base_layer"))
                below.weight.copy_(restored(layer))
        for name, layer in layers.items():
            net.get_submodule(name).weight += layer.get_delta_weight("default")
    return net


def test_every_linear_layer_but_the_output_is_4_bit():
    policy = quantised()
    layers = {n: m for n, m in policy.model.named_modules() if is_quantized(m)}
    assert len(layers) == 2 * 7
    assert not any("lm_head" in name for name in layers)
    weight = next(iter(layers.values())).weight
    assert weight.dtype == torch.uint8
    assert not weight.requires_grad


@pytest.mark.parametrize("double", [True, False])
def test_scores_are_those_of_a_plain_model_of_the_restored_weights(double: bool):
    policy = quantised(double_quantization=double)
    plain = Policy(whole(policy), vocabulary=61).eval()
    assert torch.equal(logp(policy), logp(plain)), "a fresh adapter adds nothing"
    disturb(policy)
    merged = Policy(whole(policy), vocabulary=61).eval()
    assert (logp(policy) - logp(merged)).abs().max() < 1e-4
    assert (logp(policy) - logp(plain)).abs().max() > 1e-3
    with adapter_off(policy.model):
        assert torch.equal(logp(policy), logp(plain))


def test_4_bit_weights_are_close_to_those_they_come_from():
    layer = adapter_layers(quantised().model)["model.layers.0.mlp.up_proj"].base_layer
    own = tiny_net().get_submodule("model.layers.0.mlp.up_proj").weight.detach()
    error = (restored(layer) - own).square().mean().sqrt() / own.square().mean().sqrt()
    assert 0.03 < float(error) < 0.15
    assert len(restored(layer)[0, :64].unique()) <= 16  # a row of 64 is one block


def test_gradients_are_those_of_the_restored_weights():
    torch.manual_seed(0)
    layer = adapter_layers(quantised().model)["model.layers.0.mlp.down_proj"].base_layer
    x = torch.randn(5, layer.in_features, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    for rows in (x[:1], x):
        out = layer(rows)
        assert torch.equal(out, nn.functional.linear(rows, restored(layer)))
    (layer(x) ** 2).sum().backward()
    (nn.functional.linear(again, restored(layer)) ** 2).sum().backward()
    assert torch.equal(x.grad, again.grad)


@pytest.mark.parametrize("modules", [["all-linear"], ["q_proj", "v_proj"]])
def test_an_export_merges_the_adapter_into_restored_weights(tmp_path: Path, modules: list[str]):
    tiny_net().save_pretrained(tmp_path / "base")
    policy = quantised(target_modules=modules)
    disturb(policy)
    export_merged(policy, str(tmp_path / "base"), tmp_path / "out", stop_ids=frozenset({2}))
    exported = load_file(tmp_path / "out" / "model.safetensors")
    expected = whole(policy).state_dict()
    assert len(exported) >= 2 * 9
    for name, tensor in exported.items():
        assert torch.equal(tensor, expected[name]), name
    sent = checkpoint_tensors(policy)
    assert all(tensor.is_floating_point() for tensor in sent.values())
    for name, tensor in sent.items():
        assert torch.allclose(tensor, expected[name][: len(tensor)], atol=1e-6), name


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("double", [True, False])
def test_planned_bytes_are_those_of_the_weights(double: bool, kind: str):
    net = tiny_net(kind)
    shape = shape_from(net.config.to_dict())
    assert shape is not None
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    policy = quantised(
        kind,
        double_quantization=double,
        target_modules=["all-linear"] if kind == "llama" else attention,
    )
    held = sum(p.numel() * p.element_size() for p in policy.parameters())
    for layer in policy.modules():
        if is_quantized(layer):
            state = layer.weight.quant_state
            held += state.absmax.numel() * state.absmax.element_size()
            if double:
                held += state.state2.absmax.numel() * 4
    words = [f"{MODEL}.quantization=nf4", f"{MODEL}.lora_rank=4"]
    words += [f"{MODEL}.double_quantization={double}", "trainer.stage=sft"]
    run = parse(load([], words)).config
    where = plan_placement(run, this_machine(), None)
    planned = static_memory(run, shape, where, 4).training["weights"]
    planned -= shape.hidden * shape.intermediate * 4  # the weight that is restored for a product
    # The adapter of the mixture has less than one on every linear layer.
    assert planned == pytest.approx(held, rel=0.01 if kind == "llama" else 0.04)
