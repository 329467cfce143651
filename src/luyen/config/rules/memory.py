"""P: the plan's memory against the device."""

from collections.abc import Iterator

from luyen.config.rules.rule import Finding, Situation, rule

_GIB = 1024**3


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
            fix="lower ppo_max_token_len_per_gpu, use LoRA, or take a larger device",
        )
