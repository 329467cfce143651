"""`reward`: functions and models that score rollouts."""

from luyen.config.schema.block import Block, block, key

_REWARD_MODEL = "the reward model's lifecycle"


class CustomRewardFunction(Block):
    """A scoring function of your own."""

    path: str | None = key(None, "Python file that defines the function.")
    name: str = key(
        "compute_score", "Function `(data_source, solution_str, ground_truth, extra_info)`."
    )


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

    custom_reward_function: CustomRewardFunction = block(
        CustomRewardFunction, "A scoring function of your own."
    )
    reward_manager: RewardManagerChoice = block(
        RewardManagerChoice, "Which component turns rollouts into scores."
    )
    reward_model: RewardModel = block(RewardModel, "A learned reward.")
