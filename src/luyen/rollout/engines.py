"""Rollout engines by name. A factory takes the policy, its block, and what it must know besides."""

from luyen.config.schema.rollout import Rollout
from luyen.models.policy import Policy
from luyen.rollout.hf import HfEngine
from luyen.rollout.native.engine import NativeEngine
from luyen.rollout.native.paged.engine import PagedEngine
from luyen.rollout.native.running import Decode
from luyen.rollout.protocol import RolloutEngine, rollout_engines


@rollout_engines.register("native")
def native(policy: Policy, rollout: Rollout, *, longest: int, decode: Decode) -> RolloutEngine:
    """The embedded engine; `longest` is the most tokens a sequence can have."""
    policy.is_exact = rollout.deterministic
    if policy.device.type == "cuda":
        return PagedEngine(
            policy,
            max_model_len=rollout.max_model_len or longest,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            enforce_eager=rollout.enforce_eager,
            decode=decode,
            is_open=rollout.multi_turn.enable,
        )
    return NativeEngine(
        policy,
        max_model_len=rollout.max_model_len or longest,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        decode=decode,
    )


@rollout_engines.register("hf")
def hf(policy: Policy, rollout: Rollout, *, longest: int, decode: Decode) -> RolloutEngine:
    """Plain Hugging Face generation."""
    return HfEngine(
        policy,
        decode=decode,
        max_model_len=rollout.max_model_len or longest,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
    )
