"""B: batches that divide, budgets that hold, with the arithmetic shown."""

from collections.abc import Iterator

from luyen.config.plan import needs_reference
from luyen.config.rules.rule import Finding, Situation, rule

_DATA = "data"
_ACTOR = "actor_rollout_ref.actor"


@rule("B01", "error")
def mini_batch_within_the_step(s: Situation) -> Iterator[Finding]:
    """A mini-batch holds no more prompts than a step draws."""
    data, actor = s.config.data, s.config.actor_rollout_ref.actor
    if actor.ppo_mini_batch_size > data.train_batch_size:
        yield Finding(
            field=f"{_ACTOR}.ppo_mini_batch_size",
            why=f"{actor.ppo_mini_batch_size} prompts cannot be taken from a step of "
            f"{data.train_batch_size} (data.train_batch_size)",
            fix=f"set it to at most {data.train_batch_size}",
        )


@rule("B02", "error")
def step_divides_into_mini_batches(s: Situation) -> Iterator[Finding]:
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
def mini_batch_divides_over_devices(s: Situation) -> Iterator[Finding]:
    """The rollouts of a mini-batch divide evenly over the devices."""
    devices = s.where.world_size
    rest = s.batch.mini_batch_rollouts % devices
    if rest:
        yield Finding(
            field=f"{_ACTOR}.ppo_mini_batch_size",
            why=f"{s.batch.mini_batch_rollouts} rollouts (mini-batch x rollout.n) = "
            f"{s.batch.mini_batch_rollouts // devices} x {devices} devices + {rest}",
            fix=f"make ppo_mini_batch_size x rollout.n a multiple of {devices}",
        )


@rule("B04", "error")
def device_share_divides_into_micro_batches(s: Situation) -> Iterator[Finding]:
    """With counted micro-batches, they divide a device's share of a mini-batch."""
    actor = s.config.actor_rollout_ref.actor
    size = actor.ppo_micro_batch_size_per_gpu
    if actor.use_dynamic_bsz or size is None or s.batch.mini_batch_rollouts % s.where.world_size:
        return
    share = s.batch.mini_batch_rollouts // s.where.world_size
    if share % size:
        yield Finding(
            field=f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
            why=f"a device's share of {share} rollouts = {share // size} x {size} + {share % size}",
            fix=f"choose a divisor of {share}, or set {_ACTOR}.use_dynamic_bsz=true",
        )


@rule("B05", "error")
def token_budget_holds_a_sequence(s: Situation) -> Iterator[Finding]:
    """The token budget of a micro-batch holds at least one sequence of full length."""
    data, actor = s.config.data, s.config.actor_rollout_ref.actor
    if actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu < s.batch.longest_sequence:
        yield Finding(
            field=f"{_ACTOR}.ppo_max_token_len_per_gpu",
            why=f"a sequence may have {data.max_prompt_length} + {data.max_response_length} = "
            f"{s.batch.longest_sequence} tokens",
            fix=f"set it to at least {s.batch.longest_sequence}",
        )


@rule("B11", "note")
def group_fits_a_micro_batch(s: Situation) -> Iterator[Finding]:
    """The token budget of a micro-batch grows with the group: its prompt is computed once."""
    actor, rollout = s.config.actor_rollout_ref.actor, s.config.actor_rollout_ref.rollout
    data = s.config.data
    budget = actor.ppo_max_token_len_per_gpu
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
def counted_micro_batches_need_a_size(s: Situation) -> Iterator[Finding]:
    """Without `use_dynamic_bsz`, `ppo_micro_batch_size_per_gpu` is set."""
    actor = s.config.actor_rollout_ref.actor
    if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is None:
        yield Finding(
            field=f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
            why="use_dynamic_bsz is off, so micro-batches are counted in sequences",
            fix="set a number of sequences, or use_dynamic_bsz=true",
        )


@rule("B07", "warning")
def micro_batch_size_is_read(s: Situation) -> Iterator[Finding]:
    """`ppo_micro_batch_size_per_gpu` is not set beside `use_dynamic_bsz`, which ignores it."""
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
def critic_batches_divide(s: Situation) -> Iterator[Finding]:
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
    if budget is not None and budget < s.batch.longest_sequence:
        yield Finding(
            field="critic.ppo_max_token_len_per_gpu",
            why=f"a sequence may have {s.batch.longest_sequence} tokens",
            fix=f"set it to at least {s.batch.longest_sequence}",
        )


@rule("B10", "warning")
def log_prob_sizes_are_read(s: Situation) -> Iterator[Finding]:
    """A log-prob pass is cut by tokens or by sequences, and only that size is given."""
    actor = s.config.actor_rollout_ref.actor
    rollout, ref = s.config.actor_rollout_ref.rollout, s.config.actor_rollout_ref.ref
    sides = (
        ("rollout", rollout.log_prob_use_dynamic_bsz, rollout.log_prob_micro_batch_size_per_gpu),
        ("ref", ref.log_prob_use_dynamic_bsz, ref.log_prob_micro_batch_size_per_gpu),
    )
    for side, asked, sequences in sides:
        if side == "ref" and not needs_reference(s.config):
            continue  # there are no such passes, which K07 says
        dynamic = actor.use_dynamic_bsz if asked is None else asked
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
def log_prob_budget_holds_a_sequence(s: Situation) -> Iterator[Finding]:
    """The token budgets of the log-prob passes hold a sequence of full length."""
    rollout, ref = s.config.actor_rollout_ref.rollout, s.config.actor_rollout_ref.ref
    budgets = {
        "rollout": rollout.log_prob_max_token_len_per_gpu,
        "ref": ref.log_prob_max_token_len_per_gpu,
    }
    for side, budget in budgets.items():
        if budget is not None and budget < s.batch.longest_sequence:
            yield Finding(
                field=f"actor_rollout_ref.{side}.log_prob_max_token_len_per_gpu",
                why=f"a sequence may have {s.batch.longest_sequence} tokens",
                fix=f"set it to at least {s.batch.longest_sequence}",
            )
