"""P: the plan's memory against the device."""

from collections.abc import Iterator

from luyen.config.rules.rule import Finding, Situation, rule

_GIB = 1024**3
_MICRO = "ppo_micro_batch_size_per_gpu"


@rule("P01", "warning")
def cache_holds_what_may_run(s: Situation) -> Iterator[Finding]:
    """The KV cache holds every sequence that may run at once, at full length."""
    if s.memory is not None and s.memory.kv_demand > s.memory.kv_budget:
        yield Finding(
            field="actor_rollout_ref.rollout.max_num_seqs",
            why=f"that many sequences of full length need {s.memory.kv_demand / _GIB:.1f} GiB of "
            f"KV cache and {s.memory.kv_budget / _GIB:.1f} GiB are there: some will be recomputed",
            fix="lower max_num_seqs or rollout.n, or raise gpu_memory_utilization",
        )


@rule("P02", "warning")
def peak_fits_the_device(s: Situation) -> Iterator[Finding]:
    """The phase that needs most memory fits the device."""
    if s.memory is not None and not s.memory.fits:
        peak = s.memory.peak
        largest = max(peak.parts, key=lambda part: peak.parts[part])
        yield Finding(
            field="actor_rollout_ref.model.path",
            why=f"the phase `{peak.name}` needs about {peak.total / _GIB:.1f} GiB and the device "
            f"has {s.memory.device_bytes / _GIB:.1f} GiB; most of it is {largest}",
            fix=", then ".join(_remedies(s, peak.name)),
        )


def _remedies(s: Situation, phase: str) -> Iterator[str]:
    """What is not done yet against too little memory, the cheapest first."""
    model, rollout = s.config.actor_rollout_ref.model, s.config.actor_rollout_ref.rollout
    actor, is_cuda = s.config.actor_rollout_ref.actor, s.where.device == "cuda"
    if phase == "generate":
        yield "lower rollout.max_num_seqs or rollout.gpu_memory_utilization"
    else:
        if s.batch.micro_batch_tokens > s.batch.longest_sequence:
            yield f"lower {'ppo_max_token_len_per_gpu' if actor.use_dynamic_bsz else _MICRO}"
        if not model.enable_gradient_checkpointing:
            yield "set model.enable_gradient_checkpointing to true"
        elif is_cuda and not model.enable_activation_offload:
            yield "set model.enable_activation_offload to true"
        shares = s.where.rollout_pool is None and s.config.trainer.max_staleness == 0
        if is_cuda and shares and s.config.trainer.stage == "rl" and not rollout.free_cache_engine:
            yield "set rollout.free_cache_engine to true"
    if s.where.world_size > 1 and not actor.fsdp_config.param_offload:
        yield "set fsdp_config.param_offload and fsdp_config.optimizer_offload to true"
    if model.lora_rank == 0:
        yield "set model.lora_rank (an adapter needs no optimizer state for the rest)"
    yield "take a larger device, or more of them"
