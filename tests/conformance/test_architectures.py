"""Architectures: the embedded engine agrees with plain transformers, or refuses in words."""

from typing import Any

import pytest
import torch

from luyen.base.errors import UserError
from luyen.config.model_folder.config_json import PLAIN
from luyen.models.policy import Policy
from luyen.rollout.hf_engine import HfEngine
from luyen.rollout.protocol import generate
from tests.generation import (
    native,
    packed_logps,
    pairs,
    plain_logits,
    request,
    sampled_logps,
)
from tests.tiny_models import KINDS, tiny_net, tiny_policy

ALSO: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 128},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}

# Their defaults are 128 heads with states of 256 numbers, and 512 experts.
SMALL_SSM = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
SMALL_HYBRID = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({"n_layer": 2, "n_head": 4}, "call the attention function"),
    "falcon": ({}, "call the attention function"),
    "mpt": ({"d_model": 64, "n_heads": 4, "n_layers": 2}, "call the attention function"),
    "mamba": ({}, "call the attention function"),
    "llama4_text": ({"attention_chunk_size": 8}, "chunked_attention"),
    "qwen3_next": (SMALL_HYBRID, "linear_attention"),
    "falcon_h1": ({**SMALL_SSM, "mamba_d_ssm": 128}, "running state"),
    "bamba": (SMALL_SSM, "call the attention function"),
    "codegen": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}, "call the attention"),
    "falcon_mamba": ({}, "call the attention function"),
    "jamba": ({}, "call the attention function"),
    "rwkv": ({"attention_hidden_size": 64}, "call the attention function"),
}


@pytest.mark.parametrize("kind", [*KINDS, *ALSO])
def test_native_agrees_with_plain_transformers(kind: str):
    policy = tiny_policy(kind, **ALSO.get(kind, {}))
    asked = [request(n, 14, temperature=0.0) for n in (1, 3, 17, 31)]
    ours = generate(native(policy, rows=3, longest=64), asked)
    theirs = generate(HfEngine(policy), asked)
    for key, done in ours.items():
        assert done.tokens == theirs[key].tokens
        assert done.logps == pytest.approx(theirs[key].logps, abs=1e-4)
    assert torch.tensor([x for done in ours.values() for x in done.logps]).std() > 0.05


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_packed_is_refused_with_the_way_out(kind: str):
    changes, why = REFUSED[kind]
    with pytest.raises(UserError, match=why) as caught:
        tiny_policy(kind, **changes)
    assert "actor_rollout_ref.rollout.name to hf" in caught.value.fix
    assert kind in caught.value.value


def test_check_knows_by_name_what_cannot_be_packed():
    # Chunks of Llama 4 are a matter of its configuration, not of its name.
    assert REFUSED.keys() - {"llama4_text"} == PLAIN


@pytest.mark.parametrize("kind", REFUSED)
def test_the_trainer_agrees_with_the_hf_engine_on_what_cannot_be_packed(kind: str):
    policy = Policy(tiny_net(kind, **REFUSED[kind][0]), vocabulary=61, is_packed=False).eval()
    asked = [request(n, 5, samples=2) for n in (3, 10, 40)]
    answers = pairs(asked, generate(HfEngine(policy), asked))
    scored = packed_logps(policy, answers)
    assert (scored - sampled_logps(answers)).abs().max() < 1e-4
    assert scored.std() > 0.05
    alone = torch.cat([packed_logps(policy, [answer]) for answer in answers])
    assert (scored - alone).abs().max() < 1e-4


def test_what_does_not_read_from_left_to_right_is_refused():
    net = tiny_net("mamba")
    base: Any = net.base_model
    forward = base.forward

    def backwards(input_ids: torch.Tensor, **options: Any) -> Any:
        return forward(input_ids=input_ids.flip(-1), **options)

    base.forward = backwards
    with pytest.raises(UserError, match="changes with those after it"):
        Policy(net, vocabulary=61, is_packed=False)


@pytest.mark.parametrize("kind", ["bloom", "falcon", "mpt", "mamba"])
def test_the_hf_engine_serves_what_cannot_be_packed(kind: str):
    policy = Policy(tiny_net(kind, **REFUSED[kind][0]), vocabulary=61, is_packed=False).eval()
    asked = [request(n, 6, temperature=0.0) for n in (3, 10)]
    for before, done in pairs(asked, generate(HfEngine(policy), asked)):
        logits = plain_logits(policy, before + done.tokens)[len(before) - 1 : -1]
        assert done.tokens == tuple(logits.argmax(-1).tolist())
    with pytest.raises(UserError, match="set it to hf"):
        native(policy)


def test_a_scale_of_logits_that_we_do_not_know_is_refused():
    net = tiny_net("llama")
    whole = net.forward

    def scaled(**inputs: Any) -> Any:
        out = whole(**inputs)
        out.logits = 2 * out.logits
        return out

    net.forward = scaled
    with pytest.raises(UserError, match="does something to its logits"):
        Policy(net, vocabulary=61)


def test_a_sliding_window_that_is_not_passed_on_is_refused():
    net = tiny_net("gemma2")
    net.model.layers[0].self_attn.sliding_window = None
    with pytest.raises(UserError, match="sliding window"):
        Policy(net, vocabulary=61)
