"""R: the rollout engine, its limits and its sampling."""

from collections.abc import Iterator

from luyen.base.suggest import did_you_mean
from luyen.config.plan import is_swapping
from luyen.config.rules.rule import Finding, Situation, rule

_ROLLOUT = "actor_rollout_ref.rollout"
_FEW_WAVES = 4


@rule("R01", "error")
def engine_exists(s: Situation) -> Iterator[Finding]:
    """`rollout.name` is a registered engine."""
    rollout = s.config.actor_rollout_ref.rollout
    if rollout.name not in s.known.engines:
        fix = did_you_mean(rollout.name, s.known.engines)
        yield Finding(field=f"{_ROLLOUT}.name", why="no such rollout engine is registered", fix=fix)


@rule("R02", "error")
def engine_is_installed(s: Situation) -> Iterator[Finding]:
    """The package that the engine needs is installed."""
    rollout = s.config.actor_rollout_ref.rollout
    facts = s.known.engines.get(rollout.name)
    if facts is not None and facts.package is not None and not s.installed(facts.package):
        brought = f"'luyen[{facts.extra}]'" if facts.extra is not None else facts.package
        yield Finding(
            field=f"{_ROLLOUT}.name",
            why=f"the engine needs the package {facts.package}, which is not installed here",
            fix=f"pip install {brought}, or set {_ROLLOUT}.name=native, which needs nothing",
        )


@rule("R03", "error")
def sequence_fits_the_engine(s: Situation) -> Iterator[Finding]:
    """`max_model_len` holds the longest prompt and the longest response."""
    rollout, data = s.config.actor_rollout_ref.rollout, s.config.data
    if rollout.max_model_len is not None and rollout.max_model_len < s.batch.longest_sequence:
        yield Finding(
            field=f"{_ROLLOUT}.max_model_len",
            why=f"max_prompt_length {data.max_prompt_length} + max_response_length "
            f"{data.max_response_length} = {s.batch.longest_sequence} tokens",
            fix=f"set it to at least {s.batch.longest_sequence}, or drop it",
        )


@rule("R04", "error")
def group_fits_the_token_budget(s: Situation) -> Iterator[Finding]:
    """The samples of one prompt can run at once within the engine's limits; `hf` splits them."""
    rollout = s.config.actor_rollout_ref.rollout
    for name, limit in (
        ("max_num_seqs", rollout.max_num_seqs),
        ("max_num_batched_tokens", rollout.max_num_batched_tokens),
    ):
        if rollout.n > limit and rollout.name != "hf":
            yield Finding(
                field=f"{_ROLLOUT}.{name}",
                why=f"rollout.n={rollout.n} samples of a prompt decode one token each in a pass, "
                f"and {name} allows {limit}: the group cannot run together",
                fix=f"raise {name} with rollout.n, to at least {rollout.n}",
            )


@rule("R05", "warning")
def token_budget_feeds_every_sequence(s: Situation) -> Iterator[Finding]:
    """A pass has room for one token of every sequence that may run."""
    rollout = s.config.actor_rollout_ref.rollout
    is_short = rollout.n <= rollout.max_num_batched_tokens < rollout.max_num_seqs
    if is_short and rollout.name != "hf":
        yield Finding(
            field=f"{_ROLLOUT}.max_num_batched_tokens",
            why=f"{rollout.max_num_seqs} sequences may run (max_num_seqs) but a pass holds "
            f"{rollout.max_num_batched_tokens} tokens: the others wait",
            fix=f"set it to at least {rollout.max_num_seqs}, or lower max_num_seqs",
        )


@rule("R20", "note")
def step_is_generated_in_few_waves(s: Situation) -> Iterator[Finding]:
    """The rollouts of a step run in a few waves; a larger batch first slows generation down."""
    rollout, copies = s.config.actor_rollout_ref.rollout, s.where.replicas
    room = rollout.max_num_seqs * copies
    if s.batch.rollouts <= _FEW_WAVES * room:
        return
    is_group = s.batch.prompts <= _FEW_WAVES * room
    grown = "rollout.n" if is_group else "data.train_batch_size"
    engines = f"{copies} engines hold {rollout.max_num_seqs}" if copies > 1 else "the engine holds"
    yield Finding(
        field=f"{_ROLLOUT}.n" if is_group else "data.train_batch_size",
        why=f"a step has {s.batch.rollouts} rollouts and {engines} "
        f"{'sequences each' if copies > 1 else f'{room} sequences'} at once (max_num_seqs): they "
        f"are generated in about {-(-s.batch.rollouts // room)} waves, so raising {grown} makes "
        "generation the bottleneck before the update",
        fix="raise max_num_seqs as far as the KV cache allows, add engines, or lower it",
    )


@rule("R06", "error")
def samples_differ(s: Situation) -> Iterator[Finding]:
    """Several samples of a prompt are sampled, not the likeliest answer many times."""
    rollout = s.config.actor_rollout_ref.rollout
    val_kwargs = rollout.val_kwargs
    if rollout.temperature == 0 and rollout.n > 1:
        yield Finding(
            field=f"{_ROLLOUT}.temperature",
            why=f"at temperature 0 all {rollout.n} samples of a prompt are the same",
            fix="set a temperature > 0, usually 1",
        )
    if val_kwargs.n > 1 and not val_kwargs.do_sample:
        yield Finding(
            field=f"{_ROLLOUT}.val_kwargs.n",
            why=f"without do_sample all {val_kwargs.n} validation samples are the same",
            fix="set val_kwargs.do_sample=true and a val_kwargs.temperature > 0, or n=1",
        )


@rule("R07", "error")
def validation_temperature_fits(s: Situation) -> Iterator[Finding]:
    """Sampling at validation has a temperature; a greedy one has no sampling knobs."""
    val_kwargs = s.config.actor_rollout_ref.rollout.val_kwargs
    if val_kwargs.do_sample and val_kwargs.temperature == 0:
        yield Finding(
            field=f"{_ROLLOUT}.val_kwargs.temperature",
            why="do_sample is on and the temperature is 0",
            fix="set a temperature > 0, or do_sample=false",
        )
    greedy = {
        "temperature": val_kwargs.temperature,
        "top_k": val_kwargs.top_k,
        "top_p": val_kwargs.top_p,
        "min_p": val_kwargs.min_p,
    }
    for name in greedy:
        if not val_kwargs.do_sample and s.is_changed(f"{_ROLLOUT}.val_kwargs.{name}"):
            yield Finding(
                field=f"{_ROLLOUT}.val_kwargs.{name}",
                why="do_sample is off, so it has no effect",
                fix="drop it, or set val_kwargs.do_sample=true",
            )


@rule("R08", "warning")
def engine_splits_the_model(s: Situation) -> Iterator[Finding]:
    """A model is laid over several devices only by an engine that can; others hold it whole."""
    rollout, engines = s.config.actor_rollout_ref.rollout, s.known.engines
    facts = engines.get(rollout.name)
    if facts is None or facts.splits:
        return
    others = [name for name, other in engines.items() if other.splits]
    instead = f", or set {_ROLLOUT}.name={' or '.join(others)} to split one" if others else ""
    sizes = {
        "tensor_model_parallel_size": rollout.tensor_model_parallel_size,
        "expert_parallel_size": rollout.expert_parallel_size,
    }
    for name, size in sizes.items():
        if size > 1:
            yield Finding(
                field=f"{_ROLLOUT}.{name}",
                why=f"no effect: `{rollout.name}` holds the whole model on each device, and each "
                "has a copy",
                fix=f"drop the line{instead}",
            )


@rule("R10", "error")
def prompt_fits_one_pass(s: Situation) -> Iterator[Finding]:
    """The embedded engine reads a prompt in one pass, and a turn begins with all that was said."""
    rollout, data = s.config.actor_rollout_ref.rollout, s.config.data
    longest, whose = data.max_prompt_length, "data.max_prompt_length"
    # On a GPU a conversation that grew beyond a pass is read alone.
    reads_answers = rollout.multi_turn.enable or is_swapping(s.config.trainer)
    if reads_answers and s.where.device == "cpu":
        longest += data.max_response_length - 1
        why = "a turn" if rollout.multi_turn.enable else "a new version of the weights"
        whose += f" and data.max_response_length, since {why} begins with all that was said"
    if rollout.name == "native" and rollout.max_num_batched_tokens < longest:
        yield Finding(
            field=f"{_ROLLOUT}.max_num_batched_tokens",
            why=f"a pass holds {rollout.max_num_batched_tokens} tokens and a prompt may have "
            f"{longest} ({whose})",
            fix=f"set it to at least {longest}",
        )
