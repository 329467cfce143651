"""B, P, G: batch divisibility, memory of the plan, and GPU-only keys."""

from collections.abc import Iterator

from luyen.config.plan import needs_reference
from luyen.config.rules.rule import Finding, RuleContext, rule
from luyen.config.schema.actor_rollout_ref import RefConfig, RolloutConfig

_DATA = "data"
_ACTOR = "actor_rollout_ref.actor"


@rule("B01", "error")
def mini_batch_within_the_step(s: RuleContext) -> Iterator[Finding]:
    """A mini-batch holds no more prompts than a step."""
    data, actor = s.config.data, s.config.actor_rollout_ref.actor
    if actor.ppo_mini_batch_size > data.train_batch_size:
        yield Finding(
            field=f"{_ACTOR}.ppo_mini_batch_size",
            why=f"{actor.ppo_mini_batch_size} prompts cannot be taken from a step of "
            f"{data.train_batch_size} (data.train_batch_size)",
            fix=f"set it to at most {data.train_batch_size}",
        )


@rule("B02", "error")
def step_divides_into_mini_batches(s: RuleContext) -> Iterator[Finding]:
    """`data.train_batch_size` is a multiple of `ppo_mini_batch_size`."""
    data, actor = s.config.data, s.config.actor_rollout_ref.actor
    whole, rest = divmod(data.train_batch_size, actor.ppo_mini_batch_size)
    if whole and rest:
        yield Finding(
            field=f"{_ACTOR}.ppo_mini_batch_size",
            why=f"{data.train_batch_size} prompts = {whole} x {actor.ppo_mini_batch_size} + {rest}:"
            " the last optimizer step would be a smaller one",
            fix=f"choose a divisor of {data.train_batch_size}",
        )


@rule("B03", "error")
def mini_batch_divides_over_devices(s: RuleContext) -> Iterator[Finding]:
    """The rollouts of a mini-batch divide evenly over the devices."""
    devices = max(1, s.where.world_size // s.batch.ranks_per_shard)
    rest = s.batch.mini_batch_rollouts % devices
    if rest:
        yield Finding(
            field=f"{_ACTOR}.ppo_mini_batch_size",
            why=f"{s.batch.mini_batch_rollouts} rollouts (mini-batch x rollout.n) = "
            f"{s.batch.mini_batch_rollouts // devices} x {devices} {_unit(s)} + {rest}",
            fix=f"make ppo_mini_batch_size x rollout.n a multiple of {devices}",
        )


def _unit(s: RuleContext) -> str:
    """What computes a sequence."""
    shared = s.batch.ranks_per_shard
    return "devices" if shared == 1 else f"groups of {shared} devices"


def _least_budget(s: RuleContext) -> int:
    """Tokens of a device's budget, so that those that share a sequence can hold the longest."""
    return -(-s.batch.longest_sequence // s.batch.ranks_per_sequence)


@rule("B04", "error")
def device_share_divides_into_micro_batches(s: RuleContext) -> Iterator[Finding]:
    """With counted micro-batches, they divide a device's share of a mini-batch."""
    actor = s.config.actor_rollout_ref.actor
    size = actor.ppo_micro_batch_size_per_gpu
    devices = max(1, s.where.world_size // s.batch.ranks_per_shard)
    if actor.use_dynamic_bsz or size is None or s.batch.mini_batch_rollouts % devices:
        return
    share = s.batch.mini_batch_rollouts // devices
    if share % size:
        yield Finding(
            field=f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
            why=f"a device's share of {share} rollouts = {share // size} x {size} + {share % size}",
            fix=f"choose a divisor of {share}, or set {_ACTOR}.use_dynamic_bsz=true",
        )


@rule("B05", "error")
def token_budget_holds_a_sequence(s: RuleContext) -> Iterator[Finding]:
    """The token budget of a micro-batch holds at least one sequence of full length."""
    data, actor = s.config.data, s.config.actor_rollout_ref.actor
    if actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu < _least_budget(s):
        yield Finding(
            field=f"{_ACTOR}.ppo_max_token_len_per_gpu",
            why=f"a sequence may have {data.max_prompt_length} + {data.max_response_length} = "
            f"{s.batch.longest_sequence} tokens",
            fix=f"set it to at least {_least_budget(s)}",
        )


@rule("B11", "note")
def group_fits_a_micro_batch(s: RuleContext) -> Iterator[Finding]:
    """The token budget of a micro-batch grows with the group: its prompt is computed once."""
    actor, rollout = s.config.actor_rollout_ref.actor, s.config.actor_rollout_ref.rollout
    data = s.config.data
    budget = s.batch.ranks_per_sequence * actor.ppo_max_token_len_per_gpu
    tokens = data.max_prompt_length + rollout.n * data.max_response_length
    if rollout.n > 1 and actor.use_dynamic_bsz and budget < tokens:
        yield Finding(
            field=f"{_ACTOR}.ppo_max_token_len_per_gpu",
            why=f"rollout.n={rollout.n} samples of full length and their prompt are {tokens} "
            f"tokens, and a micro-batch holds {budget}: long groups are split, and their prompt "
            "is computed once in every part",
            fix="raise it with rollout.n where memory allows",
        )


@rule("B06", "error")
def counted_micro_batches_need_a_size(s: RuleContext) -> Iterator[Finding]:
    """Without `use_dynamic_bsz`, micro-batches have a number of sequences; so have log-probs."""
    actor, rollout = s.config.actor_rollout_ref.actor, s.config.actor_rollout_ref.rollout
    if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is None:
        yield Finding(
            field=f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
            why="use_dynamic_bsz is off, so micro-batches are counted in sequences",
            fix="set a number of sequences, or use_dynamic_bsz=true",
        )
    sides: dict[str, RolloutConfig | RefConfig] = {"rollout": rollout}
    if needs_reference(s.config):
        sides["ref"] = s.config.actor_rollout_ref.ref
    for side, block in sides.items():
        is_counted = block.log_prob_use_dynamic_bsz is False
        if is_counted and actor.use_dynamic_bsz and block.log_prob_micro_batch_size_per_gpu is None:
            yield Finding(
                field=f"actor_rollout_ref.{side}.log_prob_micro_batch_size_per_gpu",
                why="these passes are counted in sequences, and the actor's update, whose size "
                "they would take, is cut by tokens",
                fix="set a number of sequences, or drop "
                f"actor_rollout_ref.{side}.log_prob_use_dynamic_bsz",
            )


@rule("B07", "warning")
def micro_batch_size_is_read(s: RuleContext) -> Iterator[Finding]:
    """`ppo_micro_batch_size_per_gpu` is not set with `use_dynamic_bsz`, which ignores it."""
    actor, critic = s.config.actor_rollout_ref.actor, s.config.critic
    sides = (
        (_ACTOR, actor.use_dynamic_bsz, actor.ppo_micro_batch_size_per_gpu),
        (
            "critic",
            actor.use_dynamic_bsz if critic.use_dynamic_bsz is None else critic.use_dynamic_bsz,
            critic.ppo_micro_batch_size_per_gpu,
        ),
    )
    for side, dynamic, size in sides:
        if dynamic and size is not None:
            yield Finding(
                field=f"{side}.ppo_micro_batch_size_per_gpu",
                why="use_dynamic_bsz fills micro-batches by tokens; the count has no effect",
                fix=f"drop it, or set {side}.use_dynamic_bsz=false",
            )


@rule("B08", "error")
def critic_batches_divide(s: RuleContext) -> Iterator[Finding]:
    """The critic's mini-batches divide the step, and its token budget holds a sequence."""
    critic, data = s.config.critic, s.config.data
    size = critic.ppo_mini_batch_size
    if size is not None and data.train_batch_size % size:
        yield Finding(
            field="critic.ppo_mini_batch_size",
            why=f"{data.train_batch_size} prompts are not a multiple of {size}",
            fix=f"choose a divisor of {data.train_batch_size}",
        )
    budget = critic.ppo_max_token_len_per_gpu
    if budget is not None and budget < _least_budget(s):
        yield Finding(
            field="critic.ppo_max_token_len_per_gpu",
            why=f"a sequence may have {s.batch.longest_sequence} tokens",
            fix=f"set it to at least {_least_budget(s)}",
        )


@rule("B10", "warning")
def log_prob_sizes_are_read(s: RuleContext) -> Iterator[Finding]:
    """A log-prob pass is cut by tokens or by sequences, and only that size is given."""
    actor = s.config.actor_rollout_ref.actor
    rollout, ref = s.config.actor_rollout_ref.rollout, s.config.actor_rollout_ref.ref
    sides = (
        ("rollout", rollout.log_prob_use_dynamic_bsz, rollout.log_prob_micro_batch_size_per_gpu),
        ("ref", ref.log_prob_use_dynamic_bsz, ref.log_prob_micro_batch_size_per_gpu),
    )
    for side, own_flag, sequences in sides:
        if side == "ref" and not needs_reference(s.config):
            continue  # there are no such passes, which K07 says
        dynamic = actor.use_dynamic_bsz if own_flag is None else own_flag
        unread = "log_prob_max_token_len_per_gpu"
        if dynamic:
            unread = "log_prob_micro_batch_size_per_gpu" if sequences is not None else ""
        field = f"actor_rollout_ref.{side}.{unread}"
        if unread and s.is_changed(field):
            yield Finding(
                field=field,
                why=f"these passes are filled by {'tokens' if dynamic else 'sequences'}, so it has "
                "no effect",
                fix=f"drop it, or set actor_rollout_ref.{side}.log_prob_use_dynamic_bsz="
                f"{'false' if dynamic else 'true'}",
            )


@rule("B09", "error")
def log_prob_budget_holds_a_sequence(s: RuleContext) -> Iterator[Finding]:
    """The token budgets of the log-prob passes hold a sequence of full length."""
    rollout, ref = s.config.actor_rollout_ref.rollout, s.config.actor_rollout_ref.ref
    budgets = {
        "rollout": rollout.log_prob_max_token_len_per_gpu,
        "ref": ref.log_prob_max_token_len_per_gpu,
    }
    for side, budget in budgets.items():
        if budget is not None and budget < _least_budget(s):
            yield Finding(
                field=f"actor_rollout_ref.{side}.log_prob_max_token_len_per_gpu",
                why=f"a sequence may have {s.batch.longest_sequence} tokens",
                fix=f"set it to at least {_least_budget(s)}",
            )


# P: the plan's memory against the device.

_GIB = 1024**3
_MICRO = "ppo_micro_batch_size_per_gpu"


@rule("P01", "warning")
def cache_holds_what_may_run(s: RuleContext) -> Iterator[Finding]:
    """The KV cache holds every sequence that may run at once, at full length."""
    if s.memory is not None and s.memory.kv_demand > s.memory.kv_budget:
        yield Finding(
            field="actor_rollout_ref.rollout.max_num_seqs",
            why=f"that many sequences of full length need {s.memory.kv_demand / _GIB:.1f} GiB of "
            f"KV cache and {s.memory.kv_budget / _GIB:.1f} GiB are there: some will be recomputed",
            fix="lower max_num_seqs or rollout.n, or raise gpu_memory_utilization",
        )


@rule("P02", "warning")
def peak_fits_the_device(s: RuleContext) -> Iterator[Finding]:
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


def _remedies(s: RuleContext, phase: str) -> Iterator[str]:
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
    can_move = s.where.world_size == 1 and is_cuda and actor.optim.name == "adamw"
    if can_move and not actor.fsdp_config.optimizer_offload:
        yield "set fsdp_config.optimizer_offload to true"
    if model.lora_rank == 0:
        yield "set model.lora_rank (an adapter needs no optimizer state for the rest)"
    yield "take a larger device, or more of them"


@rule("P03", "note")
def activations_are_recomputed_before_they_move(s: RuleContext) -> Iterator[Finding]:
    """Gradient checkpointing comes before offloading of activations."""
    model = s.config.actor_rollout_ref.model
    is_moving = model.enable_activation_offload and s.where.device == "cuda"
    if is_moving and not model.enable_gradient_checkpointing:
        yield Finding(
            field=f"{_ARR}.model.enable_activation_offload",
            why="without gradient checkpointing all that layers keep moves to host memory and "
            "back; with it, only the inputs of layers",
            fix=f"set {_ARR}.model.enable_gradient_checkpointing to true first",
        )


# G: keys that only a GPU reads.

_ARR = "actor_rollout_ref"


@rule("G01", "warning")
def device_reads_the_key(s: RuleContext) -> Iterator[Finding]:
    """Keys that only a GPU reads are changed only where there is one."""
    reasons = {
        f"{_ARR}.model.enable_activation_offload": "activations are in host memory already",
        f"{_ARR}.rollout.deterministic": "float32 is always exact where it can be",
        f"{_ARR}.rollout.enforce_eager": "a CPU has no graphs to replay",
        "trainer.profile.memory": "only CUDA keeps a history of allocations",
    }
    for field, reason in reasons.items():
        if s.where.device == "cpu" and s.is_changed(field):
            why = f"the run is on a CPU, where it has no effect: {reason}"
            yield Finding(field=field, why=why, fix="drop the line, or run on a GPU")


@rule("G02", "warning")
def cores_multiply_bf16(s: RuleContext) -> Iterator[Finding]:
    """bf16 on a CPU is chosen where the CPU has instructions for it."""
    is_bf16 = s.config.actor_rollout_ref.model.dtype == "bfloat16"
    if is_bf16 and s.where.device == "cpu" and not s.machine.has_bf16:
        why = "this CPU has no instructions for bf16: each step takes about twice as long, less "
        why += "memory is all it saves"
        yield Finding(field=f"{_ARR}.model.dtype", why=why, fix="set it to float32 or auto")
