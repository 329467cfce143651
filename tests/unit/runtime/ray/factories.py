"""Engines that replicas make: importable by name, so that they reach another process."""

import torch

from luyen.config.check import check
from luyen.models.load import load_policy
from luyen.rollout.protocol import RolloutEngine
from luyen.train.builders.roles import build_engine
from luyen.train.builders.setup import import_plugins, load_run_tokenizer
from tests.generation import native
from tests.tiny_models import tiny_policy


def tiny_engine(index: int, *, seed: int = 0) -> RolloutEngine:
    """The embedded engine over a tiny model."""
    torch.set_num_threads(1)
    return native(tiny_policy("llama", seed=seed))


def engine_of_run(index: int, *, words: tuple[str, ...]) -> RolloutEngine:
    """The engine of a run, made from nothing but its configuration."""
    torch.set_num_threads(1)
    config = check([], words).config
    import_plugins(config.trainer.plugins)
    tokenizer = load_run_tokenizer(config)
    policy = load_policy(
        config.actor_rollout_ref.model,
        device="cpu",
        vocabulary=tokenizer.size,
        seed=config.trainer.seed,
    )
    return build_engine(config, policy, tokenizer)
