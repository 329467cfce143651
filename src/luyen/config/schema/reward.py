"""`reward`: reward functions, reward models, LLM judges and the cache of their replies."""

import re
from typing import Annotated, Any, Literal, Self, cast
from urllib.parse import urlsplit

from pydantic import BeforeValidator, model_validator

from luyen.config.schema.block import MOST_DEVICES, MOST_MACHINES, Block, Pair, block, key

# `judge`: an LLM judge behind an endpoint, and the cache of its replies.

ENGINE = "engine://"
"""The `base_url` that means the rollout engine of the run, with the weights of the policy."""


def _as_texts(value: object) -> object:
    """YAML reads `yes:` and `1:` as other types; a choice is the text that was written."""
    if not isinstance(value, dict):
        return value
    named = cast(dict[object, object], value)
    words: dict[object, str] = {True: "yes", False: "no"}
    return {words[n] if isinstance(n, bool) else str(n): score for n, score in named.items()}


class JudgeConfig(Block):
    """A model behind an OpenAI-compatible endpoint, as written under a component's `judge`."""

    base_url: str = key(..., "Endpoint up to `/v1`, or `engine://` for the run's own engine.")
    model: str = key("policy", "Name of the model at the endpoint.", min_length=1)
    api_key_env: str | None = key(None, "Environment variable that holds the key; null: no key.")
    system: str | None = key(None, "System message of every request.")
    prompt: str = key(
        ..., "The question: `{answer}`, `{question}` and `{ground_truth}` are filled in."
    )
    parse: Literal["number", "choice", "regex", "json"] = key(
        "number", "How the score is read out of the reply."
    )
    choices: Annotated[dict[str, float], BeforeValidator(_as_texts)] = key(
        {}, "choice: word of the reply -> score."
    )
    pattern: str | None = key(None, "regex: its first group is the number; the last match counts.")
    json_key: str = key("score", "json: path of the number; dots separate levels.", min_length=1)
    scale: Pair | None = key(
        None, "Worst and best number, mapped to 0 and 1; null: any number, as it is."
    )
    timeout_s: float = key(60.0, "Most seconds for one request.", gt=0)
    retries: int = key(3, "More requests for the same score after one that failed.", ge=0)
    temperature: float = key(0.0, "Temperature of the judge.", ge=0)
    max_tokens: int = key(512, "Most tokens of a reply.", ge=1)
    concurrency: int = key(8, "Most requests at once to this endpoint.", ge=1)
    requests_per_minute: float | None = key(
        None, "Most requests a minute to this endpoint; null: as many as there are.", gt=0
    )

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.base_url != ENGINE:
            _check_url(self.base_url)
        if "{answer}" not in self.prompt:
            raise ValueError("prompt does not show {answer}, so every answer would score alike")
        if (self.parse == "choice") != bool(self.choices):
            raise ValueError("choices are needed for parse: choice, and for nothing else")
        if (self.parse == "regex") != (self.pattern is not None):
            raise ValueError("pattern is needed for parse: regex, and for nothing else")
        if self.pattern is not None:
            _check_pattern(self.pattern)
        if self.scale is not None and self.parse == "choice":
            raise ValueError("scale has no effect on choices: write the scores you want there")
        if self.scale is not None and not self.scale[0] < self.scale[1]:
            raise ValueError("scale is [worst, best], and worst must be below best")
        return self


def _check_url(base_url: str) -> None:
    try:
        parts = urlsplit(base_url)
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise ValueError(f"base_url is no address: {error}") from error
    if not is_sound:
        raise ValueError(f"base_url begins with http:// or https://, or is {ENGINE}")


def _check_pattern(pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"pattern is no regular expression: {error}") from error
    if groups < 1:
        raise ValueError("pattern has no group, and the first one is the number")


class RewardCacheConfig(Block):
    """Cache of scores, keyed by what was scored."""

    enable: bool = key(
        False, "Keep replies of judges and scores of deterministic rules, and use them again."
    )
    path: str | None = key(
        None, "File of the cache, which runs may share; null: one in the run directory."
    )


Combine = Literal["sum", "gdpo", "lexicographic", "product", "min"]
"""How the nodes of a tree become one value."""


class CustomRewardFunctionConfig(Block):
    """A scoring function of your own."""

    path: str | None = key(None, "Python file that defines the function.")
    name: str = key(
        "compute_score",
        "Function `(data_source, solution_str, ground_truth, extra_info)`, or, as TRL calls them, "
        "`(completions, **columns)`.",
    )
    reward_kwargs: dict[str, Any] = key({}, "Keyword arguments added to every call of it.")


class GateConfig(Block):
    """When a node counts: where a sibling reaches a bar. Otherwise it is not scored."""

    by: str = key(..., "Name of the sibling that is looked at.")
    at_least: float | None = key(None, "Open from this value of it on; null without `below`: 1.")
    below: float | None = key(None, "Open only under this value of it.")
    otherwise: float = key(0.0, "The node's value where the gate is closed.")


class ComponentConfig(Block):
    """A node of the reward tree, as written under `reward.components` or under `parts`.

    Its value comes from exactly one of `rule`, `judge`, `model` and `parts`. It is then scaled,
    shifted and clipped, normalised if so wished, and enters the node above times its weight.
    """

    rule: str | None = key(None, "Registered rule that scores.")
    judge: JudgeConfig | None = key(None, "An LLM judge that scores.")
    model: Literal["reward_model"] | None = key(None, "The reward model of `reward.reward_model`.")
    parts: "dict[str, ComponentConfig] | None" = key(None, "Nodes below this one.")
    combine: Combine = key("sum", "parts: how they make one value.")
    kwargs: dict[str, Any] = key({}, "Arguments of the rule.")
    scale: float = key(1.0, "Factor of the score.")
    shift: float = key(0.0, "Added to it then.")
    floor: float | None = key(None, "Least value; a lower one is raised to it.")
    ceiling: float | None = key(None, "Largest value; a higher one is lowered to it.")
    normalise: Literal["none", "running"] = key(
        "none", "running: less the mean of all steps before, over their standard deviation."
    )
    gate: GateConfig | None = key(None, "Where the node counts.")
    bar: float = key(1.0, "Under lexicographic: the value from which on later nodes count.")
    weight: float = key(1.0, "Factor in the node above.")


class OverlongBufferConfig(Block):
    """DAPO's soft penalty for answers close to the longest allowed."""

    enable: bool = key(False, "dapo: add the penalty.")
    len: int = key(4096, "dapo: tokens before the limit over which the penalty grows.", ge=1)
    penalty_factor: float = key(1.0, "dapo: the penalty at the limit.", ge=0)


class RewardManagerConfig(Block):
    """Which component turns rollouts into scores."""

    name: str = key("naive", "Registered reward manager: `naive`, `batch`, `dapo`, `prime`.")


class RewardModelRolloutConfig(Block):
    """How the reward model is run."""

    name: str = key(
        "native",
        "Engine of the reward model.",
        only="conversations are scored in packed forward passes, without generating",
    )
    gpu_memory_utilization: float = key(
        0.5,
        "Share of the device's memory.",
        gt=0,
        le=1,
        only="there is no cache to give memory to; max_num_batched_tokens bounds what a pass takes",
    )
    tensor_model_parallel_size: int = key(
        1, "Devices that share one copy.", ge=1, only="every copy is on one device"
    )
    data_parallel_size: int | None = key(
        None, "Copies, among which conversations are dealt; null: one on each of its devices.", ge=1
    )
    max_num_batched_tokens: int = key(8192, "Most tokens of one pass.", ge=1)
    max_num_seqs: int = key(256, "Most conversations of one pass.", ge=1)
    max_model_len: int | None = key(
        None,
        "Most tokens of a conversation, beyond which it is a fault and never cut; null: what the "
        "model and a pass can take.",
        ge=1,
    )


class RewardModelConfig(Block):
    """A reward model, on shared devices or its own."""

    enable: bool = key(False, "Score with a reward model.")
    enable_resource_pool: bool = key(False, "Give the reward model devices of its own.")
    nnodes: int = key(0, "Machines of that pool.", ge=0, le=MOST_MACHINES)
    n_gpus_per_node: int = key(0, "Devices of each of these machines.", ge=0, le=MOST_DEVICES)
    model_path: str | None = key(None, "Directory or hub id of the reward model.")
    steps: Literal["min", "mean", "product"] | None = key(
        None,
        "For a process reward model: how the probabilities that the steps of an answer, which are "
        "its lines, are right become its reward; null: the score of the whole answer is it.",
    )
    param_offload: bool | None = key(
        None,
        "On a GPU: keep the weights in host memory while nothing is scored; null: if other roles "
        "use the device too.",
    )
    rollout: RewardModelRolloutConfig = block(
        RewardModelRolloutConfig, "How the reward model is run."
    )


class RewardConfig(Block):
    """Where scores come from."""

    components: dict[str, Any] = key(
        {}, "Parts of the reward: `NAME: {rule: RULE, weight: 1.0, kwargs: {...}}`."
    )
    combine: Combine = key("sum", "How the components make the reward.")
    routes: dict[str, Any] = key(
        {}, "Pattern of a data source -> components or rules that score it; built-in ones follow."
    )
    num_workers: int = key(8, "Most groups scored at once, and most scoring processes.", ge=1)
    timeout_s: float = key(
        10.0, "Most seconds for one score, where a process or a coroutine computes it.", gt=0
    )
    memory_mb: int | None = key(
        4096, "Most MiB that one scoring process may hold; null: all there is.", ge=64
    )
    on_fault: Literal["tolerate", "fail", "drop"] = key(
        "tolerate",
        "When a score cannot be computed. tolerate: leave the rollout out, and stop the run when "
        "more of a step fail than `max_outside_share` and `max_fault_share` allow; fail: stop the "
        "run; drop: leave the rollout out, as long as any has a score.",
    )
    max_fault_share: float = key(
        0.01,
        "tolerate: largest share of a step's scores in which the code of the reward may fail, "
        "rounded up to a whole score.",
        ge=0,
        le=1,
    )
    max_outside_share: float = key(
        0.1,
        "tolerate: the same for reasons outside the answer and the code: a judge that cannot be "
        "reached or does not answer in time.",
        ge=0,
        le=1,
    )
    cache: RewardCacheConfig = block(RewardCacheConfig, "Scores that were computed once.")
    overlong_buffer: OverlongBufferConfig = block(
        OverlongBufferConfig, "DAPO's soft penalty for length."
    )
    custom_reward_function: CustomRewardFunctionConfig = block(
        CustomRewardFunctionConfig, "A scoring function of your own."
    )
    reward_manager: RewardManagerConfig = block(
        RewardManagerConfig, "Which component turns rollouts into scores."
    )
    reward_model: RewardModelConfig = block(RewardModelConfig, "A reward model.")
