"""Policies with random weights in the shapes that people train: for benchmarks and self-tests."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from luyen.config.schema.model import ModelConfig
from luyen.models.hf_loading import config_of, inspect_folder
from luyen.models.load import save_memory
from luyen.models.lora import add_adapter
from luyen.models.policy import Policy

_SPREAD = 0.2
"""Standard deviation of the weights: at the usual 0.02 every token is about equally likely, and a
difference in the last bit of a logit would vanish in the log-probability."""


def random_policy(source: str = "builtin://arithmetic", *, seed: int = 0) -> Policy:
    """A policy of the shape in `source`, fp32; the same seed gives the same weights."""
    field = "actor_rollout_ref.model.path"
    where = inspect_folder(ModelConfig(path=source), source, field=field, has_weights=False)
    config = config_of(where, field=field)
    config.initializer_range = _SPREAD
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Policy(net, vocabulary=net.config.vocab_size).eval()


# Shapes of popular models, for benchmarks without their weights.

_QWEN25 = {"model_type": "qwen2", "vocab_size": 151936, "tie_word_embeddings": True}

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        **_QWEN25,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "qwen2.5-1.5b": {
        **_QWEN25,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen2.5-32b": {
        **_QWEN25,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
}
"""Published configurations by short name."""


def shaped_policy(
    name: str,
    *,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    model: ModelConfig | None = None,
) -> Policy:
    """A policy with random weights of a shape in `SHAPES`, or of the model in a directory.

    `model` says what saves memory, and which adapter learns; None: all weights, nothing saved.
    """
    loader: Any = AutoConfig
    if name in SHAPES:
        shape = {"max_position_embeddings": 32768, **SHAPES[name]}
        config = loader.for_model(shape.pop("model_type"), **shape)
    else:
        where = inspect_folder(ModelConfig(path=name), name, field="--model", has_weights=False)
        config = config_of(where, field="--model")
    makes: Any = AutoModelForCausalLM
    # Made on their device: a host core takes 6 s to initialise 135M numbers, a GPU next to none.
    place = torch.device(device)
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), place:
        torch.manual_seed(seed)
        net = makes.from_config(config, dtype=dtype).to(place)
    if model is not None and model.lora_rank > 0:
        add_adapter(net, model, seed=seed)
    policy = Policy(net, vocabulary=net.config.get_text_config().vocab_size)
    if model is not None:
        save_memory(policy.model, model)
    return policy.eval()
