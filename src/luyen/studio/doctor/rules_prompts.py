"""Rules about what is asked: how prompts are written, cut into tokens, and drawn."""

from collections import Counter
from collections.abc import Iterator
from statistics import fmean

from luyen.base.records import Source
from luyen.studio.doctor.findings import Symptom, rule
from luyen.studio.doctor.read import RECENT, RunRecord
from luyen.studio.doctor.rollouts import name_of, prompt_of
from luyen.studio.doctor.tuning import other_data, repair
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
    """What ids, counted, have no business in this model."""
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
            experiment=other_data(
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
    """The sampler draws the same prompts step after step."""
    uids = {s: {r.rollout.group.uid for r in rows} for s, rows in record.rollouts.items()}
    pairs = [(step, uids[step - 1], now) for step, now in uids.items() if step - 1 in uids]
    if len(pairs) < RECENT - 1:
        return
    overlap = fmean(len(before & now) / len(now) for _, before, now in pairs)
    if overlap > _REPEATED:
        yield Symptom(
            says=f"{overlap:.0%} of the prompts of a step were in the step before it",
            experiment=other_data(
                "look at data.sampler and at the number of rows that were left after filtering: "
                "there are fewer than two steps take, or they are not walked through"
            ),
            steps=tuple(step for step, _, _ in pairs),
            numbers={"overlap": overlap},
        )
