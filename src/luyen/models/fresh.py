"""A model of a known shape with random weights, for checks that need no training."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from luyen.models.load import model_directory
from luyen.models.policy import Policy

_SPREAD = 0.2
"""Standard deviation of the weights: at the usual 0.02 every token is about equally likely, and a
difference in the last bit of a logit would vanish in the log-probability."""


def random_policy(source: str = "builtin://arithmetic", *, seed: int = 0) -> Policy:
    """A policy of the shape in `source`, fp32; the same seed gives the same weights."""
    net = _random_model(source, seed)
    return Policy(net, vocabulary=net.config.vocab_size).eval()


def save_random_model(
    directory: Path, source: str = "builtin://arithmetic", *, seed: int = 0
) -> None:
    """Write config and random weights; tokenizer files are the caller's to add."""
    _random_model(source, seed).save_pretrained(directory)


def _random_model(source: str, seed: int) -> Any:
    config: Any = AutoConfig.from_pretrained(model_directory(source))
    config.initializer_range = _SPREAD
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
