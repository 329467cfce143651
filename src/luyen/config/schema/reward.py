"""`reward`: functions and models that score rollouts."""

from typing import Any, Literal

from luyen.config.schema.block import Block, block, key

_REWARD_MODEL = "the reward model's lifecycle"


class CustomRewardFunction(Block):
    """A scoring function of your own."""

    path: str | None = key(None, "Python file that defines the function.")
    name: str = key(
        "compute_score", "Function `(data_source, solution_str, ground_truth, extra_info)`."
    )
    reward_kwargs: dict[str, Any] = key({}, "Keyword arguments added to every call of it.")


class Component(Block):
    """One named part of the reward, as written under `reward.components`."""

    rule: str = key(..., "Registered rule that judges.")
    weight: float = key(1.0, "Factor in the sum.")
    kwargs: dict[str, Any] = key({}, "Knobs of the rule.")


class OverlongBuffer(Block):
    """DAPO's soft penalty for answers close to the longest allowed."""

    enable: bool = key(False, "dapo: add the penalty.")
    len: int = key(4096, "dapo: tokens before the limit over which the penalty grows.", ge=1)
    penalty_factor: float = key(1.0, "dapo: the penalty at the limit.", ge=0)


class RewardManagerChoice(Block):
    """Which component turns rollouts into scores."""

    name: str = key("naive", "Registered reward manager: `naive`, `batch`, `dapo`, `prime`.")


class RewardModelRollout(Block):
    """How the reward model is run."""

    name: str = key("native", "Engine of the reward model.")
    gpu_memory_utilization: float = key(
        0.5, "Share of the device's memory.", gt=0, le=1, awaits=_REWARD_MODEL
    )
    tensor_model_parallel_size: int = key(
        1, "Devices that share one copy.", ge=1, awaits=_REWARD_MODEL
    )
    data_parallel_size: int = key(1, "Copies.", ge=1, awaits=_REWARD_MODEL)
    max_num_batched_tokens: int = key(
        8192, "Most tokens of one forward pass.", ge=1, awaits=_REWARD_MODEL
    )
    max_num_seqs: int = key(256, "Most sequences at once.", ge=1, awaits=_REWARD_MODEL)
    max_model_len: int | None = key(
        None, "Most tokens of a sequence; null: as the policy's.", ge=1, awaits=_REWARD_MODEL
    )


class RewardModel(Block):
    """A learned reward, with a life of its own."""

    enable: bool = key(False, "Score with a reward model.")
    enable_resource_pool: bool = key(False, "Give the reward model devices of its own.")
    nnodes: int = key(0, "Machines of that pool.", ge=0)
    n_gpus_per_node: int = key(0, "Devices of each of these machines.", ge=0)
    model_path: str | None = key(None, "Directory or hub id of the reward model.")
    rollout: RewardModelRollout = block(RewardModelRollout, "How the reward model is run.")


class Reward(Block):
    """Where scores come from."""

    components: dict[str, Any] = key(
        {}, "Parts of the reward: `NAME: {rule: RULE, weight: 1.0, kwargs: {...}}`, summed."
    )
    routes: dict[str, Any] = key(
        {}, "Pattern of a data source -> components or rules that judge it; built-in ones follow."
    )
    num_workers: int = key(8, "Most groups judged at once, and most processes for judging.", ge=1)
    timeout_s: float = key(
        10.0, "Most seconds for one score, where a process or a coroutine computes it.", gt=0
    )
    on_fault: Literal["fail", "drop"] = key(
        "fail", "When a score cannot be computed: stop the run, or leave the rollout out."
    )
    overlong_buffer: OverlongBuffer = block(OverlongBuffer, "DAPO's soft penalty for length.")
    custom_reward_function: CustomRewardFunction = block(
        CustomRewardFunction, "A scoring function of your own."
    )
    reward_manager: RewardManagerChoice = block(
        RewardManagerChoice, "Which component turns rollouts into scores."
    )
    reward_model: RewardModel = block(RewardModel, "A learned reward.")
