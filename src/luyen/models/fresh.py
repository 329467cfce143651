"""A model of a known shape with random weights, for checks that need no training."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from luyen.config.schema.model import Model
from luyen.models.loading import config_of, inspect_folder
from luyen.models.policy import Policy

_SPREAD = 0.2
"""Standard deviation of the weights: at the usual 0.02 every token is about equally likely, and a
difference in the last bit of a logit would vanish in the log-probability."""


def random_policy(source: str = "builtin://arithmetic", *, seed: int = 0) -> Policy:
    """A policy of the shape in `source`, fp32; the same seed gives the same weights."""
    field = "actor_rollout_ref.model.path"
    where = inspect_folder(Model(path=source), source, field=field, has_weights=False)
    config = config_of(where, field=field)
    config.initializer_range = _SPREAD
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Policy(net, vocabulary=net.config.vocab_size).eval()
