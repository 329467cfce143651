"""`actor_rollout_ref.rollout` and `.ref`: generation and the reference policy."""

from typing import Any, Literal

from luyen.config.schema.block import (
    MOST_DEVICES,
    MOST_MACHINES,
    Block,
    Ids,
    Names,
    block,
    key,
)
from luyen.config.schema.derived import N_WORDS


class EnvironmentChoice(Block):
    """A world, as written under `multi_turn.environments`."""

    kind: str = key(..., "Registered kind of environment.")
    kwargs: dict[str, Any] = key({}, "Keyword arguments of it.")


class MultiTurn(Block):
    """Conversations with tools and environments."""

    enable: bool = key(False, "Let the policy take several turns and call tools.")
    tool_config_path: str | None = key(None, "YAML file that lists the tools.")
    function_tool_path: str | None = key(None, "Python file whose `@tool` functions are tools.")
    format: str = key(
        "hermes",
        "How tool calls are written: `hermes`, `qwen3_coder`, `llama3`, `mistral`, `glm`, "
        "`deepseek`, `gpt_oss` or a plugin's.",
    )
    max_assistant_turns: int | None = key(None, "Most turns of the policy; null: no limit.", ge=1)
    max_user_turns: int | None = key(
        None, "Most answers to the policy, by tools or a user; null: no limit.", ge=1
    )
    max_tool_calls: int | None = key(None, "Most calls of a rollout; null: no limit.", ge=1)
    max_parallel_calls: int = key(
        1,
        "Most calls of one turn that are run, side by side; the policy reads about the rest.",
        ge=1,
    )
    max_tool_response_length: int = key(256, "Most characters of a tool's result.", ge=1)
    tool_response_truncate_side: Literal["left", "middle", "right"] = key(
        "middle", "Where a longer result is cut."
    )
    tokenization_sanity_check_mode: Literal["strict", "ignore_strippable", "off"] = key(
        "strict",
        "Compare the grown token list with a full re-render: stop at any difference in what the "
        "policy did not write, let whitespace pass, or do not compare.",
    )
    on_parse_failure: Literal["observe", "answer", "stop"] = key(
        "observe",
        "A call that cannot be read: tell the policy, take the text as its answer, or end.",
    )
    on_tool_error: Literal["observe", "fault"] = key(
        "observe", "A tool that raises or times out: tell the policy, or break the rollout."
    )
    on_unknown: Literal["retry", "fault"] = key(
        "retry",
        "A call that was under way when the run was killed, so that nobody knows whether it acted: "
        "make it again (tools can ask for its idempotency key), or leave the rollout out.",
    )
    tool_timeout_s: float = key(30.0, "Most seconds of a call, where a tool says nothing.", gt=0)
    time_budget_s: float | None = key(None, "Most seconds of a rollout; null: no limit.", gt=0)
    on_fault: Literal["fail", "retry", "keep_min"] = key(
        "retry",
        "A rollout that broke: stop the run, play it again, or leave it out. After the last retry "
        "it is left out.",
    )
    fault_retries: int = key(1, "retry: how often a broken rollout is played again.", ge=1)
    min_samples: int = key(
        1,
        "Sound rollouts that a group must keep to learn from it; otherwise all of it is left out.",
        ge=1,
    )
    environments: dict[str, Any] = key(
        {}, "Worlds by name: `NAME: {kind: KIND, kwargs: {...}}`; a row's `environment` names one."
    )
    environment: str | None = key(None, "World of rows that name none; null: only tools answer.")
    interaction_config_path: str | None = key(
        None, "verl's YAML file of user simulators; rows name one in `interaction_kwargs`."
    )


class ValKwargs(Block):
    """Sampling at validation."""

    n: int = key(1, "Samples of each validation prompt.", ge=1)
    do_sample: bool = key(False, "Sample; otherwise take the likeliest token.")
    temperature: float = key(0.0, "Sampling temperature.", ge=0)
    top_k: int = key(-1, "Keep the k likeliest tokens; -1: all.", ge=-1)
    top_p: float = key(1.0, "Keep the likeliest tokens of this total mass.", gt=0, le=1)
    min_p: float = key(
        0.0, "Keep tokens at least this likely, relative to the likeliest.", ge=0, le=1
    )
    max_new_tokens: int | None = key(
        None, "Most tokens of an answer; null: `data.max_response_length`.", ge=1
    )
    min_new_tokens: int | None = key(
        None, "Tokens before which nothing ends an answer; null: as in training.", ge=0
    )
    stop: Names | None = key(None, "Texts that end an answer; null: as in training.")
    stop_token_ids: Ids | None = key(
        None, "More tokens that end an answer; null: as in training.", max_length=32
    )


class LogProbBatching(Block):
    """How a pass that only computes log-probabilities is cut into micro-batches."""

    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "Sequences of one forward pass; null: as in the actor's update.", ge=1
    )
    log_prob_use_dynamic_bsz: bool | None = key(
        None, "Fill these passes by tokens; null: as `actor.use_dynamic_bsz`."
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None, "Token budget of these passes; null: as `actor.ppo_max_token_len_per_gpu`.", ge=1
    )


class Rollout(LogProbBatching):
    """The engine that generates, and how it samples."""

    name: str = key("native", "Rollout engine: `native`, `hf` or a plugin's.")
    n: int = key(
        1,
        "Samples of each prompt; group-relative estimators need at least 2.",
        derived=N_WORDS,
        ge=1,
    )
    temperature: float = key(1.0, "Sampling temperature.", ge=0)
    top_k: int = key(-1, "Keep the k likeliest tokens; -1: all.", ge=-1)
    top_p: float = key(1.0, "Keep the likeliest tokens of this total mass.", gt=0, le=1)
    min_p: float = key(
        0.0, "Keep tokens at least this likely, relative to the likeliest.", ge=0, le=1
    )
    min_new_tokens: int = key(
        0,
        "Tokens of an answer, or of a turn, before which no stop token is drawn and no stop string "
        "ends it.",
        ge=0,
    )
    stop: Names = key(
        (), "Texts that end an answer, or a turn; they stay in it, as every drawn token does."
    )
    stop_token_ids: Ids = key(
        (), "Tokens that end an answer, or a turn, besides the tokenizer's own.", max_length=32
    )
    gpu_memory_utilization: float = key(
        0.5, "Share of the device's memory that weights and KV cache may take.", gt=0, le=1
    )
    tensor_model_parallel_size: int = key(1, "Devices that share one copy of the model.", ge=1)
    data_parallel_size: int | None = key(
        None, "Copies of the engine; null: as many as its devices can hold.", ge=1
    )
    nnodes: int = key(
        0,
        "Machines that only draw, besides those that train; 0: the engine shares the devices of "
        "the actor.",
        ge=0,
        le=MOST_MACHINES,
    )
    n_gpus_per_node: int | None = key(
        None,
        "Devices of each of these machines; null: `trainer.n_gpus_per_node`.",
        ge=1,
        le=MOST_DEVICES,
    )
    expert_parallel_size: int = key(1, "Devices that share the experts of a layer.", ge=1)
    deterministic: bool = key(
        True,
        "On a GPU: the sampler's and the trainer's log-probabilities agree to the bit. Off, faster "
        "kernels are used and the gap is measured.",
    )
    enforce_eager: bool = key(
        False, "On a GPU: launch every kernel of a decode step instead of replaying a graph."
    )
    free_cache_engine: bool = key(
        False, "On a GPU: give the memory of keys and values back while weights are updated."
    )
    max_num_batched_tokens: int = key(8192, "Most tokens of one forward pass.", ge=1)
    max_model_len: int | None = key(
        None, "Most tokens of a sequence; null: prompt and response lengths together.", ge=1
    )
    max_num_seqs: int = key(256, "Most sequences that run at once.", ge=1)
    calculate_log_probs: bool = key(
        True,
        "Return the log-probability of each sampled token from the engine.",
        only="an engine always returns them; nothing is saved without",
    )
    val_kwargs: ValKwargs = block(ValKwargs, "Sampling at validation.")
    multi_turn: MultiTurn = block(MultiTurn, "Conversations with tools.")


class Ref(LogProbBatching):
    """The frozen policy that KL terms compare with."""

    enable: bool | None = key(
        None, "Keep a reference policy; null: exactly when a KL term needs it."
    )
    path: str | None = key(
        None, "Weights of the reference; null: the policy before training (with LoRA: adapter off)."
    )
