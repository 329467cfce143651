"""Rules about rollouts: prompts, parity of sampler and trainer, lengths, tool calls."""

from collections import Counter
from collections.abc import Iterator
from statistics import fmean

from luyen.base.records import Source
from luyen.studio.doctor.findings import (
    Symptom,
    change_data,
    longer_budget,
    repair,
    rule,
    shorter_answers,
)
from luyen.studio.doctor.record import RECENT, WINDOW, RunRecord, name_of, prompt_of
from luyen.telemetry.rollout_files import RecordedRollout

_REPEATED = 0.5
"""Share of a step's prompts that the step before had too: a pass over the rows has no repeats."""
_TWICE = 0.1
"""Share of a step's groups whose prompt another group has: the end of a pass makes a few."""
_OFTEN = 2
"""Steps in which that must be so."""
_UNKNOWN = 0.02
"""Share of prompt tokens that stand for nothing: a word in fifty is lost."""
_FOREIGN = 0.01
"""Share of sampled ids that the tokenizer does not know."""


@rule("no-chat-template", "warning")
def no_chat_template(record: RunRecord) -> Iterator[Symptom]:
    """Prompts hold no special token: the chat template was not applied."""
    known = record.vocabulary
    if known is None or not known.special:
        return
    # The first token may be one that begins every text, which says nothing about turns.
    bare = [
        (step, name_of(r))
        for step, rollouts in record.rollouts.items()
        for r in rollouts
        if known.special.isdisjoint(prompt_of(r)[1:])
    ]
    total = sum(len(rollouts) for rollouts in record.rollouts.values())
    if bare and 2 * len(bare) > total:
        yield Symptom(
            says=f"the prompts of {len(bare)} of {total} rollouts hold no special token of the "
            "tokenizer: an instruction-tuned model does not know whose turn it is",
            experiment=repair(
                "give prompts as messages (data.prompt_key), and a tokenizer with a chat template"
            ),
            steps=tuple(sorted({step for step, _ in bare})),
            numbers={"rollouts": float(len(bare)), "of": float(total)},
            rollouts=tuple(name for _, name in bare[:3]),
        )


@rule("vocabulary-mismatch", "error")
def vocabulary_mismatch(record: RunRecord) -> Iterator[Symptom]:
    """Tokenizer and model do not belong together."""
    prompts: Counter[int] = Counter()
    sampled: Counter[int] = Counter()
    for rollouts in record.rollouts.values():
        for recorded in rollouts:
            prompts.update(prompt_of(recorded))
            rollout = recorded.rollout
            pairs = zip(rollout.tokens, rollout.sources, strict=True)
            sampled.update(token for token, source in pairs if source == Source.SAMPLED)
    for what, value in _strange(record, prompts, sampled):
        yield Symptom(
            says=f"{what}: {value:.3g}",
            experiment=repair("set actor_rollout_ref.model.tokenizer_path to the model's own"),
            steps=tuple(record.rollouts),
            numbers={what: value},
        )


def _strange(
    record: RunRecord, prompts: Counter[int], sampled: Counter[int]
) -> Iterator[tuple[str, float]]:
    """Token ids that do not fit the model or the tokenizer, as (description, value)."""
    rows, known = record.embedding_rows, record.vocabulary
    largest = max([*prompts, *sampled], default=0)
    if rows is not None and largest >= rows:
        yield f"largest id in the rollouts, of a model with {rows} rows", float(largest)
    if known is None or not prompts or not sampled:
        return
    foreign = sum(count for i, count in sampled.items() if i >= known.size) / sampled.total()
    if foreign > _FOREIGN:
        yield "share of sampled ids that the tokenizer does not know", foreign
    unknown = 0 if known.unknown is None else prompts[known.unknown] / prompts.total()
    if unknown > _UNKNOWN:
        yield "share of prompt tokens that are the tokenizer's unknown token", unknown


@rule("duplicate-prompts", "warning")
def duplicate_prompts(record: RunRecord) -> Iterator[Symptom]:
    """The same prompt is in several groups of a step, so its samples are not compared."""
    shares = {step: _twice(rollouts) for step, rollouts in record.rollouts.items()}
    wrong = {step: share for step, share in shares.items() if share > _TWICE}
    if len(wrong) >= min(_OFTEN, len(shares)) and wrong:
        yield Symptom(
            says=f"up to {max(wrong.values()):.0%} of the groups of a step have the prompt of "
            "another group",
            experiment=change_data(
                "data.filter_duplicates=true, and look at a sampler of your own",
            ),
            steps=tuple(wrong),
            numbers={f"step {step}": share for step, share in wrong.items()},
        )


def _twice(rollouts: list[RecordedRollout]) -> float:
    """Share of the groups of a step whose prompt an earlier group has."""
    prompts = {str(r.rollout.group): prompt_of(r) for r in rollouts}
    return 1 - len(set(prompts.values())) / len(prompts)


@rule("repeated-prompts", "warning", steps=RECENT)
def repeated_prompts(record: RunRecord) -> Iterator[Symptom]:
    """The data sampler returns the same prompts step after step."""
    uids = {s: {r.rollout.group.uid for r in rows} for s, rows in record.rollouts.items()}
    pairs = [(step, uids[step - 1], now) for step, now in uids.items() if step - 1 in uids]
    if len(pairs) < RECENT - 1:
        return
    overlap = fmean(len(before & now) / len(now) for _, before, now in pairs)
    if overlap > _REPEATED:
        yield Symptom(
            says=f"{overlap:.0%} of the prompts of a step were in the step before it",
            experiment=change_data(
                "look at data.sampler and at the number of rows that were left after filtering: "
                "there are fewer than two steps take, or they are not walked through"
            ),
            steps=tuple(step for step, _, _ in pairs),
            numbers={"overlap": overlap},
        )


# Rules about generation: parity with the trainer, staleness of weights, lengths.

_MEAN_GAP = 0.02
"""Mean gap in nats a token: twice what bf16 kernels of two engines differ by."""
_WORST_GAP = 2.0
"""Gap of a single token at which its importance is wrong by a factor of seven."""
_CUT = 0.5
"""Share of answers that end at the budget: most rewards are those of half an answer."""
_LONGER, _TOKENS = 2.0, 4.0
"""Times the first length, and tokens above it, that are an explosion when the reward stays."""
_GAIN = 0.05
"""Rise of the reward, in its own spread, that a longer answer may cost something for."""


@rule("parity-gap", "warning", steps=WINDOW)
def parity_gap(record: RunRecord) -> Iterator[Symptom]:
    """Sampler and trainer disagree about the probability of the same tokens."""
    # Where rollouts are older than the weights, only tokens of the same version say anything.
    is_ahead = record.config.trainer.max_staleness > 0
    names = ("engine_mean", "engine_max") if is_ahead else ("mean_gap", "max_gap")
    measured = {name: record.series(f"parity/{name}") for name in names}
    mean, worst = measured.values()
    if not (mean.has_end or (is_ahead and len(mean))):
        return
    if mean.end() > _MEAN_GAP or (worst.has_end and worst.end() > _WORST_GAP):
        rollout = record.config.actor_rollout_ref.rollout
        change = "actor_rollout_ref.rollout.deterministic=true"
        if rollout.deterministic:
            change = "`luyen selftest` with this model: it says where the two part"
        shares = _shares(record)
        yield Symptom(
            says=f"log-probabilities differ by {mean.end():.3g} nats in the mean and "
            f"{worst.end():.3g} at worst{_where(record)}",
            experiment=repair(change),
            steps=mean.last_steps,
            numbers={**{f"parity/{n}": c.end() for n, c in measured.items()}, **shares},
            rollouts=tuple(dict.fromkeys(token["rollout"] for token in record.worst_tokens)),
        )


def _shares(record: RunRecord) -> dict[str, float]:
    """Shares of the gap by cause, where the run has them."""
    shares = {
        name: record.series(f"parity/{name}_share") for name in ("engine", "staleness", "drift")
    }
    return {f"parity/{n}_share": c.end() for n, c in shares.items() if c.has_end}


def _where(record: RunRecord) -> str:
    """The worst token of the latest step that wrote any."""
    if not record.worst_tokens:
        return ""
    worst = record.worst_tokens[0]
    return (
        f"; worst of the latest step: {worst['text']!r} at {worst['position']} of "
        f"{worst['rollout']}, {worst['trainer']:.3g} for {worst['sampler']:.3g} ({worst['part']})"
    )


# Which way the sampler is off: on tokens that it sampled itself, its own log-probabilities are the
# higher ones in the mean, by the KL divergence from the trainer, whatever weights and temperature
# it has. Where they are the lower ones, they are not those of what it samples from.

_BIAS = "rollout_corr/kl"
"""Mean of the sampler's log-probability minus the trainer's."""
_AT_ONCE = 0.5
"""Share of the latest difference that is there in the first step if weights are not its cause."""


@rule("logprob-convention", "error", steps=WINDOW)
def logprob_convention(record: RunRecord) -> Iterator[Symptom]:
    """The sampler reports log-probabilities of another distribution than it samples from."""
    bias, gap = record.series(_BIAS), record.series("parity/engine_mean")
    if not (bias.has_end and gap.has_end) or gap.end() <= _MEAN_GAP or bias.end() >= -_MEAN_GAP:
        return
    rollout = record.config.actor_rollout_ref.rollout
    yield Symptom(
        says=f"on its own samples the sampler's log-probabilities are {-bias.end():.3g} nats below "
        "the trainer's in the mean, which no distribution that is sampled from can be: they are "
        f"reported before the temperature ({rollout.temperature:g}) is applied, or after a filter",
        experiment=repair(
            "let the engine report log-probabilities of softmax(logits / temperature): vllm with "
            "--logprobs-mode processed_logprobs, sglang without SGLANG_RETURN_ORIGINAL_LOGPROB"
        ),
        steps=bias.last_steps,
        numbers={_BIAS: bias.end(), "parity/engine_mean": gap.end()},
    )


@rule("temperature-twice", "error", steps=WINDOW)
def temperature_twice(record: RunRecord) -> Iterator[Symptom]:
    """The sampler has been another distribution from the first step on, at a temperature."""
    bias, rollout = record.series(_BIAS), record.config.actor_rollout_ref.rollout
    if not bias.has_end or rollout.temperature in (0.0, 1.0) or bias.end() <= _MEAN_GAP:
        return
    if bias.values[0] < _AT_ONCE * bias.end():
        return
    yield Symptom(
        says=f"the sampler differs from the trainer by {bias.values[0]:.3g} nats in the first step,"
        f" when their weights are the same: the temperature {rollout.temperature:g} may be applied "
        "twice, by the request and by the server's own settings",
        experiment=repair("drop the temperature from the server's settings, or set it to 1"),
        steps=bias.last_steps,
        numbers={_BIAS: bias.end(), "first step": bias.values[0]},
    )


@rule("stale-server", "error", steps=WINDOW)
def stale_server(record: RunRecord) -> Iterator[Symptom]:
    """The sampler says that it has the latest weights, and computes with older ones."""
    bias, gap = record.series(_BIAS), record.series("parity/engine_mean")
    if not (bias.has_end and gap.has_end) or min(bias.end(), gap.end()) <= _MEAN_GAP:
        return
    if bias.values[0] >= _AT_ONCE * bias.end() or gap.values[0] > _MEAN_GAP:
        return
    yield Symptom(
        says=f"the sampler agreed with the trainer in the first step ({gap.values[0]:.3g} nats) and"
        f" is {gap.end():.3g} off by now, on tokens that it gives the latest version: it does not "
        "compute with the weights that were published",
        experiment=repair(
            "look whether the server loads what it acknowledges; a restart gives it the weights"
        ),
        steps=bias.last_steps,
        numbers={_BIAS: bias.end(), "parity/engine_mean": gap.end()},
    )


@rule("stale-weights", "error")
def stale_weights(record: RunRecord) -> Iterator[Symptom]:
    """Rollouts were sampled with older weights than the run allows."""
    allowed, late = record.config.trainer.max_staleness, dict[int, list[tuple[int, str]]]()
    for step, rollouts in record.rollouts.items():
        for recorded in rollouts:
            versions = [v for b in recorded.rollout.branches for v in b.versions if v is not None]
            # Step s begins with the weights of s - 1 updates.
            age = (step - 1) - min(versions) if versions else 0
            if age > allowed:
                late.setdefault(step, []).append((age, name_of(recorded)))
    if late:
        oldest = max(age for found in late.values() for age, _ in found)
        yield Symptom(
            says=f"rollouts are up to {oldest} steps old; trainer.max_staleness is {allowed}",
            experiment=repair("look whether the engine receives the weights after every update"),
            steps=tuple(sorted(late)),
            numbers={"oldest": float(oldest), "allowed": float(allowed)},
            rollouts=tuple(name for found in late.values() for _, name in found[:1]),
        )


@rule("truncation", "warning", steps=WINDOW)
def truncation(record: RunRecord) -> Iterator[Symptom]:
    """Most answers end at the token budget."""
    cut = record.series("response_length/cut_fraction")
    if cut.has_end and cut.end() > _CUT:
        yield Symptom(
            says=f"{cut.end():.0%} of the answers of the last {WINDOW} steps are cut at "
            f"data.max_response_length={record.config.data.max_response_length}",
            experiment=longer_budget(record),
            steps=cut.last_steps,
            numbers={"response_length/cut_fraction": cut.end()},
        )


@rule("length-explosion", "warning", steps=2 * WINDOW)
def length_explosion(record: RunRecord) -> Iterator[Symptom]:
    """Answers grow and the reward does not."""
    length, reward = record.series("response_length/mean"), record.series("reward/mean")
    if not length.has_both_ends or not reward.has_both_ends:
        return
    spread = record.series("reward/std").start() if len(record.series("reward/std")) else 0.0
    is_longer = length.end() > max(_LONGER * length.start(), length.start() + _TOKENS)
    if is_longer and reward.end() <= reward.start() + _GAIN * spread:
        yield Symptom(
            says=f"answers have {length.end():.3g} tokens instead of {length.start():.3g}, and the "
            f"reward is {reward.end():.3g} instead of {reward.start():.3g}",
            experiment=shorter_answers(record),
            steps=length.last_steps,
            numbers={
                "response_length/mean": length.end(),
                "at the beginning": length.start(),
                "reward/mean": reward.end(),
            },
        )


# Rules about conversations with tools.

_NEVER = 0.01
"""Share of conversations with a call: one in a hundred teaches no use of tools."""
_FAILING = 0.2
"""Share of calls that succeed: four of five are wasted turns."""


@rule("tools-never-called", "warning", steps=WINDOW)
def tools_never_called(record: RunRecord) -> Iterator[Symptom]:
    """Tools are offered, and the policy never calls them."""
    multi_turn = record.config.actor_rollout_ref.rollout.multi_turn
    offers = bool(multi_turn.tool_config_path or multi_turn.function_tool_path)
    called = record.series("tools/call_fraction")
    if multi_turn.enable and offers and called.has_end and called.end() < _NEVER:
        yield Symptom(
            says=f"{called.end():.1%} of the conversations of the last {WINDOW} steps call a tool",
            experiment=repair(
                f"`luyen rollout --pretty`: does the policy write calls as multi_turn.format="
                f"{multi_turn.format} reads them, and does the prompt show the tools?"
            ),
            steps=called.last_steps,
            numbers={"tools/call_fraction": called.end()},
        )


@rule("tools-failing", "warning", steps=WINDOW)
def tools_failing(record: RunRecord) -> Iterator[Symptom]:
    """Nearly every tool call fails, or cannot be read."""
    for name, change in (
        (
            "tools/success_fraction",
            repair("read `calls` in rollouts/: the tool raises or times out, whatever it is asked"),
        ),
        (
            "tools/valid_fraction",
            change_data(
                "show calls in the prompt, or teach the format first (trainer.stage=sft)",
                "look whether multi_turn.format is the one the model was trained with",
            ),
        ),
    ):
        share = record.series(name)
        if share.has_end and share.end() < _FAILING:
            yield Symptom(
                says=f"{name} is {share.end():.0%} in the last {WINDOW} steps with calls",
                experiment=change,
                steps=share.last_steps,
                numbers={name: share.end()},
            )
