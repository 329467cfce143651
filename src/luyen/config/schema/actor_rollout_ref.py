"""`actor_rollout_ref`: model, optimizer, FSDP, actor update, rollout engine and reference."""

from typing import Any, Literal

from luyen.config.schema.block import (
    LR_WORDS,
    MINI_BATCH_WORDS,
    MOST_DEVICES,
    MOST_MACHINES,
    N_WORDS,
    Block,
    Ids,
    Names,
    Pair,
    block,
    key,
)

# `fsdp_config`: how weights are sharded over devices.


class FsdpConfig(Block):
    """Sharding of weights, gradients and optimizer state, for training on several devices."""

    fsdp_size: int = key(
        -1, "Devices that hold one copy of the weights together; -1: all of them.", ge=-1
    )
    reshard_after_forward: bool = key(
        True, "Let go of a layer's whole weights between its forward and its backward pass."
    )
    param_offload: bool = key(
        False, "Keep shards of weights and gradients in host memory, with `optimizer_offload`."
    )
    optimizer_offload: bool = key(
        False,
        "Keep the optimizer in host memory. On one GPU it computes there, in pieces, with the same "
        "results (only adamw); shards need `param_offload` too, and it computes in host memory.",
    )
    tensor_parallel_size: int = key(
        1,
        "Devices that divide every layer by heads, inner width and vocabulary, of actor, reference "
        "and critic alike; weights are sharded further over the rest.",
        ge=1,
    )
    expert_parallel_size: int = key(
        1,
        "megatron: devices with different sequences over which the experts of a mixture are "
        "divided, in addition to those of `tensor_parallel_size`.",
        ge=1,
    )
    ulysses_sequence_parallel_size: int = key(
        1,
        "Devices that compute each sequence together, of actor, reference and critic alike. Token "
        "budgets are for each of them: so many devices hold so many times the tokens.",
        ge=1,
    )


# `optim`: the optimizer and its schedule, the same for actor and critic.


class OptimConfig(Block):
    """The optimizer, warm-up, schedule and clipping."""

    name: Literal["adamw", "adamw_8bit", "muon"] = key(
        "adamw",
        "adamw; adamw_8bit: moments in 8 bits (extra `quant`); muon: orthogonalised momentum for "
        "the matrices of decoder layers, AdamW for embeddings, head, norms and biases.",
    )
    lr: float = key(1e-6, "Peak learning rate.", derived=LR_WORDS, ge=0, le=1000)
    lr_warmup_steps: int = key(
        -1,
        "Steps of linear warm-up; -1: use `lr_warmup_steps_ratio`. It is "
        "shortened to end with a run that is shorter.",
        ge=-1,
    )
    lr_warmup_steps_ratio: float = key(
        0.0, "Warm-up as a share of all steps, when `lr_warmup_steps` is -1.", ge=0, le=1
    )
    lr_scheduler_type: Literal["constant", "cosine", "linear", "wsd"] = key(
        "constant", "Course of the learning rate after the warm-up."
    )
    min_lr_ratio: float = key(0.0, "Where all but constant end, as a share of `lr`.", ge=0, le=1)
    weight_decay: float = key(0.01, "Decoupled weight decay.", ge=0, le=1000)
    betas: Pair = key((0.9, 0.999), "AdamW's moment decays.")
    momentum: float = key(0.95, "muon: decay of the momentum (Nesterov's).", ge=0, lt=1)
    clip_grad: float = key(1.0, "Largest norm of the gradient of a step.", gt=0)


class CriticOptimConfig(OptimConfig):
    """The critic's optimizer: the same keys, a higher rate."""

    lr: float = key(1e-5, "Peak learning rate.", ge=0, le=1000)


# `actor_rollout_ref.actor`: batches, loss and optimizer of the policy update.

Aggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


class PolicyLossConfig(Block):
    """Which policy loss, and the hyperparameters that only some losses have."""

    loss_mode: str = key("vanilla", "Name of a registered policy loss.")
    clip_cov_ratio: float = key(2e-4, "clip_cov: share of tokens set aside.", gt=0, le=1)
    clip_cov_lb: float = key(1.0, "clip_cov: covariance above which a token may be set aside.")
    clip_cov_ub: float = key(5.0, "clip_cov: covariance below which a token may be set aside.")
    kl_cov_ratio: float = key(2e-4, "kl_cov: share of tokens that get a KL penalty.", gt=0, le=1)
    ppo_kl_coef: float = key(0.1, "kl_cov: weight of that penalty.", ge=0)
    dro_beta: float | None = key(None, "dro: weight of the quadratic term; no default.", gt=0)
    ratio_cap: float | None = key(
        None, "vanilla, gspo: upper cap of the unclipped ratio (TRL's `delta`).", gt=1
    )
    cispo_cap: float | None = key(
        None, "cispo: absolute cap of the ratio without a lower bound (TRL's form).", gt=0
    )
    vespo_k_pos: float = key(2.0, "vespo: k where the advantage is not negative.", ge=0)
    vespo_lambda_pos: float = key(3.0, "vespo: λ where the advantage is not negative.", gt=0)
    vespo_k_neg: float = key(3.0, "vespo: k where the advantage is negative.", ge=0)
    vespo_lambda_neg: float = key(2.0, "vespo: λ where the advantage is negative.", gt=0)


class AdaptiveEntropyConfig(Block):
    """An entropy coefficient that follows a target."""

    enable: bool = key(False, "Move the entropy coefficient towards a target entropy.")
    target: float = key(0.2, "Entropy to hold, in nats a token.", ge=0)
    delta: float = key(0.005, "Change of the coefficient at each optimizer step.", gt=0)
    min: float = key(0.0, "Smallest coefficient.", ge=0)
    max: float = key(1.0, "Largest coefficient.", ge=0)


class RouterReplayConfig(Block):
    """`actor.router_replay`: experts that the trainer's layers use."""

    mode: Literal["disabled", "R3"] = key(
        "disabled",
        "R3: those that the sampler chose, for old log-probabilities and updates; routers keep "
        "their gradients. disabled: the trainer's routers choose.",
    )


class ActorConfig(Block):
    """The policy update."""

    strategy: str = key(
        "auto",
        "Name of a registered training engine; auto: single for one device, fsdp2 for more. fsdp "
        "and deepspeed are read as fsdp2; megatron needs the extra of its name.",
    )
    fsdp_config: FsdpConfig = block(FsdpConfig, "How weights are sharded over several devices.")
    ppo_mini_batch_size: int = key(
        256,
        "Prompts of one optimizer step, over the whole cluster.",
        derived=MINI_BATCH_WORDS,
        ge=1,
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "Sequences of one forward pass on one device, when `use_dynamic_bsz` is off.", ge=1
    )
    use_dynamic_bsz: bool = key(True, "Fill micro-batches by tokens instead of counting sequences.")
    ppo_max_token_len_per_gpu: int = key(
        16384, "Hard token budget of a micro-batch, when `use_dynamic_bsz` is on.", ge=1
    )
    ppo_epochs: int = key(1, "Passes over the samples of a step.", ge=1)
    shuffle: bool = key(False, "Draw mini-batches in a seeded random order.")
    policy_loss: PolicyLossConfig = block(PolicyLossConfig, "Policy loss and its hyperparameters.")
    clip_ratio: float = key(0.2, "Clip range of the ratio on both sides.", gt=0)
    clip_ratio_low: float | None = key(None, "Lower clip range; null: `clip_ratio`.", gt=0)
    clip_ratio_high: float | None = key(None, "Upper clip range; null: `clip_ratio`.", gt=0)
    clip_ratio_c: float | None = key(
        None, "Dual clip or ratio cap; null: the loss's own (vanilla 3, dppo 20).", gt=1
    )
    tau_pos: float = key(1.0, "sapo: temperature where the advantage is positive.", gt=0)
    tau_neg: float = key(1.05, "sapo: temperature elsewhere.", gt=0)
    loss_agg_mode: Aggregation | None = key(
        None, "How token losses become one number; null: the loss's own aggregation."
    )
    loss_scale_factor: float | None = key(
        None, "Divisor of seq-mean-token-sum-norm; null: `data.max_response_length`.", gt=0
    )
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus.")
    adaptive_entropy: AdaptiveEntropyConfig = block(
        AdaptiveEntropyConfig, "A coefficient with a target."
    )
    use_kl_loss: bool = key(False, "Add a KL term to the reference policy to the loss.")
    kl_loss_coef: float = key(0.001, "Weight of the KL term in the loss.", ge=0)
    kl_loss_type: str = key("low_var_kl", "Estimator of that KL; a trailing + is straight-through.")
    router_aux_loss_coef: float = key(
        0.0,
        "Mixtures of experts: weight of the load-balance loss, as transformers defines it, over "
        "all tokens of an optimizer step. Above 0 each step makes one more pass over its tokens.",
        ge=0,
    )
    router_replay: RouterReplayConfig = block(
        RouterReplayConfig, "Mixtures of experts: whose routers decide in training."
    )
    calculate_sum_pi_squared: bool = key(
        False, "Record Σπ² of each token, which the optimal token baselines need."
    )
    optim: OptimConfig = block(OptimConfig, "Optimizer and schedule.")


# `actor_rollout_ref.rollout` and `.ref`: generation and the reference policy.


class EnvironmentConfig(Block):
    """An environment, as written under `multi_turn.environments`."""

    kind: str = key(..., "Registered kind of environment.")
    kwargs: dict[str, Any] = key({}, "Keyword arguments of it.")


class MultiTurnConfig(Block):
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
    max_tool_response_length: int = key(
        256, "Most characters of a tool's result.", ge=1, le=1_000_000
    )
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
        "A call that was under way when the run was killed and may or may not have taken effect: "
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
        {},
        "Environments by name: `NAME: {kind: KIND, kwargs: {...}}`; a row's `environment` names "
        "one.",
    )
    environment: str | None = key(
        None, "Environment of rows that name none; null: only tools answer."
    )
    interaction_config_path: str | None = key(
        None, "verl's YAML file of user simulators; rows name one in `interaction_kwargs`."
    )


class ValKwargsConfig(Block):
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


class LogProbBatchingConfig(Block):
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


class ServerConfig(Block):
    """The server of a rollout engine that generates in another process."""

    python: str | None = key(
        None,
        "Python of the environment that the server is installed in; null: the run's own.",
    )
    transport: Literal["folder", "group", "ipc", "transfer"] = key(
        "folder",
        "How weights reach the server. folder: a safetensors file that it loads; group: broadcasts "
        "of a process group (gloo on CPUs, NCCL between GPUs); ipc: memory of the GPU that trainer "
        "and server share; transfer: vLLM's own transfer engine, by NCCL. With vLLM, group and ipc "
        "need a server that the run starts.",
    )
    lora_format: Literal["merged", "adapter"] = key(
        "merged",
        "What is sent of a policy with an adapter (`model.lora_rank`). merged: all weights, the "
        "adapter added; adapter: the adapter alone, in a folder that the server loads.",
    )
    start_timeout_s: float = key(
        600.0, "Most seconds until a server answers after it was started.", gt=0
    )
    request_timeout_s: float = key(
        600.0, "Most seconds of one request; then it is sent again.", gt=0
    )
    retries: int = key(
        3,
        "How often a request or a publication is repeated after a fault of the server; then the "
        "run ends with the first one.",
        ge=0,
    )
    logprobs: Literal["raw", "processed", "llama_cpp"] = key(
        "raw",
        "openai: log-probabilities that the endpoint reports. raw: before the temperature is "
        "applied, so that it can only be 0 or 1; processed: after it; llama_cpp: after it, on "
        "request, as llama.cpp does.",
    )
    accept_gap: bool = key(
        False,
        "Train without a rollout correction although the server's log-probabilities differ from "
        "the trainer's by rounding.",
    )


class RolloutConfig(LogProbBatchingConfig):
    """The engine that generates, and how it samples."""

    name: str = key(
        "native", "Rollout engine: `native`, `hf`, `vllm`, `sglang`, `openai` or a plugin's."
    )
    server_urls: Names = key(
        (),
        "Addresses of servers that run already, one for each copy of the engine; empty: the run "
        "starts its own.",
    )
    server: ServerConfig = block(ServerConfig, "The server of an engine that has one.")
    engine_kwargs: dict[str, Any] = key(
        {}, "More options of a server by engine: `vllm: {OPTION: VALUE}`, named as on its page."
    )
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
        "Tokens of an answer, or of a turn, before which no stop token is sampled and no stop "
        "string ends it.",
        ge=0,
    )
    stop: Names = key(
        (), "Texts that end an answer, or a turn; they stay in it, as every sampled token does."
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
        "Machines that only generate, besides those that train; 0: the engine shares the devices "
        "of the actor.",
        ge=0,
        le=MOST_MACHINES,
    )
    n_gpus_per_node: int | None = key(
        None,
        "Devices of each of these machines; null: `trainer.n_gpus_per_node`.",
        ge=1,
        le=MOST_DEVICES,
    )
    expert_parallel_size: int | None = key(
        None,
        "Mixtures of experts: devices of a copy that share the experts of a layer; each expert is "
        "whole on one of them. null: all devices of the copy with `native`, and with vLLM and "
        "SGLang their own default, which divides each expert.",
        ge=1,
    )
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
    cuda_ipc: bool = key(
        False,
        "On Ray: a replica on the GPU of the rank that trains copies weights from the rank's "
        "memory (CUDA IPC), and not through the host. Not seen on a GPU so far.",
    )
    enable_rollout_routing_replay: bool = key(
        False,
        "Mixtures of experts: record with each rollout the experts that the sampler chose, measure "
        "how often the trainer's routers choose others, and let `actor.router_replay` use them. "
        "Prefixes are not cached then.",
    )
    enable_prefix_caching: bool = key(
        True,
        "Keep keys and values of prompts and answers, so that a request that begins alike reads "
        "only what is new; answers stay the same.",
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
    val_kwargs: ValKwargsConfig = block(ValKwargsConfig, "Sampling at validation.")
    multi_turn: MultiTurnConfig = block(MultiTurnConfig, "Conversations with tools.")


class RefConfig(LogProbBatchingConfig):
    """The frozen policy that KL terms compare with."""

    enable: bool | None = key(
        None, "Keep a reference policy; null: exactly when a KL term needs it."
    )
    path: str | None = key(
        None, "Weights of the reference; null: the policy before training (with LoRA: adapter off)."
    )
    nnodes: int = key(
        0,
        "Machines that only the reference has; 0: it shares the devices of the actor.",
        ge=0,
        le=MOST_MACHINES,
    )
    n_gpus_per_node: int | None = key(
        None,
        "Devices of each of these machines; null: `trainer.n_gpus_per_node`.",
        ge=1,
        le=MOST_DEVICES,
    )
