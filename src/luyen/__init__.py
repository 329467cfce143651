"""Luyen: a runtime for reinforcement-learning post-training of language models.

This is the public surface: what a script, a notebook or a plugin may import. A name is loaded when
it is first used, so `import luyen` stays quick and loads no torch. `docs/api.md` lists the names.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "luyen.api": ("check", "evaluate", "load_run", "train"),
    "luyen.studio.run_object": ("MetricTable", "Plot", "Run"),
    "luyen.base.errors": ("UserError",),
    "luyen.base.records": ("GroupId", "Prompt", "Rollout", "Score", "make_prompt"),
    "luyen.algorithms": ("padded",),
    "luyen.algorithms.advantages": ("Credit", "CreditInputs", "adv_estimators"),
    "luyen.algorithms.policy_losses": ("PolicyInputs", "TokenLoss", "policy_losses"),
    "luyen.telemetry.callbacks": ("Callback", "TrainingProgress", "Stop"),
    "luyen.telemetry.early_stopping": ("EarlyStopping",),
    "luyen.data.samplers": ("AdaptiveSampler", "Sampler", "samplers"),
    "luyen.runtime.training": ("ModelsOnRanks", "RankPlace", "TrainingEngine", "training_engines"),
    "luyen.models.policy": ("Policy",),
    "luyen.models.weights": ("Fingerprint",),
    "luyen.rewards.protocol": ("Reward",),
    "luyen.rewards.reward_managers": ("ManagerContext", "reward_managers"),
    "luyen.rewards.rules.rule": ("rule_rewards",),
    "luyen.rewards.tree": ("with_part",),
    "luyen.rollout.env.protocol": ("Observation", "envs"),
    "luyen.rollout.protocol": (
        "Completion",
        "Request",
        "RolloutEngine",
        "Sampling",
        "rollout_engines",
    ),
    "luyen.rollout.tools": ("ToolError", "ToolReply", "idempotency_key", "tool", "tool_class"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}

__all__: list[str] = sorted(("__version__", *_PLACES))  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'luyen' has no attribute {name!r}")
    if name == "padded":
        return import_module("luyen.algorithms.padded")
    return vars(import_module(_PLACES[name]))[name]


def __dir__() -> list[str]:
    return __all__
