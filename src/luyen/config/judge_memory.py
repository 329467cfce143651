"""Memory of a reward model on one device."""

from dataclasses import dataclass, replace
from typing import final

from luyen.config.activations import Pass, Tokens
from luyen.config.model_shape import read_shape
from luyen.config.plan import Placement, reward_pool
from luyen.config.schema.model import Model
from luyen.config.schema.run import RunConfig

PART = "reward model"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeMemory:
    """Bytes of a reward model.

    Example:
        >>> JudgeMemory(weights=10, activations=2, is_alone=False, is_resident=True).beside()
        {'reward model': 10}
    """

    weights: int
    """All weights of one copy."""
    activations: int
    """What its largest pass has at once."""
    is_alone: bool
    """Whether its devices are its own."""
    is_resident: bool
    """Whether weights stay on the device while nothing is judged."""

    def beside(self) -> dict[str, int]:
        """What it takes of the device of others while they work."""
        is_there = bool(self.weights) and self.is_resident and not self.is_alone
        return {PART: self.weights} if is_there else {}

    def judging(self, others: dict[str, int]) -> dict[str, int]:
        """What is on its device while it judges; nothing where there is no such model."""
        if not self.weights:
            return {}
        own = {PART: self.weights, "activations": self.activations}
        return own if self.is_alone else {**others, **own}


NOBODY = JudgeMemory(weights=0, activations=0, is_alone=True, is_resident=False)


def judge_memory(config: RunConfig, where: Placement, largest: Pass) -> JudgeMemory:
    """Of the reward model of a run; 0 where there is none, or its sizes are not known here."""
    reward_model = config.reward.reward_model
    if not reward_model.enable or reward_model.model_path is None:
        return NOBODY
    shape = read_shape(Model(path=reward_model.model_path))
    if shape is None:
        return NOBODY
    width = 2 if where.device == "cuda" else 4
    read = reward_model.rollout.max_num_batched_tokens
    tokens = Tokens(packed=read, padded=read, computed=read, scored=0)
    one_pass = replace(largest, shape=shape, tokens=tokens, width=width)
    is_alone = reward_pool(config) is not None
    offload = not is_alone if reward_model.param_offload is None else reward_model.param_offload
    embedding = shape.vocab * shape.hidden
    # A head of one number takes the place of the vocabulary's.
    weights = shape.layers * shape.layer_parameters() + embedding + 2 * shape.hidden
    return JudgeMemory(
        weights=weights * width,
        activations=one_pass.inside(),
        is_alone=is_alone,
        is_resident=where.device == "cpu" or not offload,
    )
