"""Small random models of many architectures, made through transformers without any file."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.utils.chat_template_utils import _compile_jinja_template

from luyen.models.policy import Policy

VOCABULARY = 61
DEVICE = os.environ.get("LUYEN_TEST_DEVICE", "cpu")
"""Where tiny policies live; `make test-gpu` says cuda."""

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Large weights: probabilities far from uniform, so that an error shows.
    "initializer_range": 0.3,
}

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 8, "head_dim": 16},
    "gemma2": {
        "initializer_range": 0.06,
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3_text": {
        "initializer_range": 0.06,
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "phi3": {},
    "olmo2": {},
    "gpt_neox": {"rotary_pct": 0.5},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2, "embedding_multiplier": 2.0},
    "granite_swa": {
        "attention_multiplier": 0.2,
        "layer_types": ["sliding_attention", "full_attention"],
        "layer_rope_theta": [500.0, 0],
        "sliding_window": 8,
    },
    "cohere2": {
        "logit_scale": 0.5,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    },
}
MIXTURES = ("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe")
"""Those with experts."""


def tiny_net(kind: str = "llama", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model; `changes` replace values of its configuration."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**COMMON, **KINDS.get(kind, {}), **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tiny_policy(kind: str = "llama", *, vocabulary: int = VOCABULARY, **changes: Any) -> Policy:
    """A policy over a random model."""
    return Policy(tiny_net(kind, **changes).to(DEVICE), vocabulary=vocabulary).eval()


def tiny_judge_net(
    kind: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A random model with one number as its head, as transformers makes reward models."""
    config = AutoConfig.for_model(kind, **{**COMMON, **KINDS.get(kind, {}), **changes})
    config.num_labels = changes.get("num_labels", 1)
    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_config(config, dtype=dtype).eval()


def padded_scores(folder: Path, talks: list[Any]) -> tuple[Tensor, Tensor]:
    """What transformers says of conversations: each alone, and all in one batch padded right."""
    net: Any = read_judge_net(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    forms = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    batch = tokenizer.apply_chat_template(talks, padding=True, padding_side="right", **forms)
    assert (batch["attention_mask"] == 0).any(), "the conversations have several lengths"
    with torch.no_grad():
        alone = [net(**tokenizer.apply_chat_template([t], **forms)).logits[0, 0] for t in talks]
        return torch.stack(alone), net(**batch).logits[:, 0]


def read_judge_net(folder: Path) -> PreTrainedModel:
    """A reward model as transformers itself reads it."""
    return AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()


def read_net(folder: Path) -> PreTrainedModel:
    """A causal language model of a directory, in fp32 and as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def their_template(source: str) -> Any:
    """A chat template as transformers itself compiles it."""
    return _compile_jinja_template(source)
