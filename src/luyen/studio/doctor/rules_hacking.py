"""The rule about reward hacking: the reward rises while what it stands for does not.

The reward is compared with other measurements of the run: held-out accuracy, its own components,
and above all components of weight 0, which are measured but not trained on.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev, variance
from typing import TypeVar, final

from luyen.base.records import Rollout, Score, Source
from luyen.config.reward_components import nodes, read_components
from luyen.config.schema.reward import RewardConfig
from luyen.rewards.metrics import correlation
from luyen.studio.doctor.findings import Experiment, Symptom, change_data, more_kl, rule
from luyen.studio.doctor.record import RECENT, WINDOW, RunRecord, name_of
from luyen.telemetry.rollout_files import RecordedRollout

# Statistics over recorded rewards: early rollouts against the latest ones.

_T = TypeVar("_T")
_FEWEST = 8
"""Groups on a side: with fewer, the variance between groups is a guess."""
_RISEN = 2.0
"""Standard errors above which a component counts as improved; lower than `_CERTAIN`, since an
improvement clears the run of suspicion."""
_LONGER, _MORE_TOKENS = 2.0, 4.0
"""Times the first length, and tokens above it, from which on answers have grown."""
_REPEATED = 0.2
"""Rise of the share of repeated 3-grams that counts as repetition."""
_FOLLOWS = 0.5
"""Correlation with a property above which the reward pays for that property."""
_NGRAM = 3
_SHOWN = 3


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedComponent:
    """A component of weight 0, early and late in a run.

    Example:
        >>> TrackedComponent(name="exact", before=0.6, now=0.1, spread=0.5, change=-9.0,
        ...         has_risen=False, correlation=-0.2, parting=-6.0, against=-3.0).now
        0.1
    """

    name: str
    """Its name."""
    before: float
    """Its mean in the early steps, or in the best of them if the fall from there is surer."""
    now: float
    """Its mean in the latest ones."""
    spread: float
    """Its standard deviation over all rollouts that were read."""
    change: float
    """How far it moved, in standard errors of the means of groups."""
    has_risen: bool
    """Whether it is better than in all early steps together."""
    correlation: float | None
    """Its correlation with the whole reward in the latest steps; None where one never differs."""
    parting: float
    """How far that moved since the early steps, in standard errors."""
    against: float
    """How far it lies from 0, in standard errors."""
    examples: tuple[str, ...] = ()
    """Late rollouts with the highest reward of those that have less of it than the mean had."""


def has_proxy(reward: RewardConfig) -> bool:
    """Whether the reward uses a learned scorer: a reward model or an LLM judge."""
    found = nodes(read_components(reward)[0])
    return any(n.weight and (n.judge is not None or n.model is not None) for _, n in found)


def reward_rise(record: RunRecord) -> float:
    """How far the reward itself moved between the same rollouts, in standard errors."""
    steps = [_judged(rows, None) for rows in _steps(record)]
    early, late = _joined(steps[:-RECENT]), _joined(steps[-RECENT:])
    return _moved(early, late) if _is_enough(early) and _is_enough(late) else 0.0


def watched_in(record: RunRecord, name: str) -> TrackedComponent | None:
    """Statistics of a component in the recorded rollouts; None if there are too few of them.

    Also None if its early mean is not above 0: then it is a penalty, not a goal.
    """
    steps = [_judged(rows, name) for rows in _steps(record)]
    early, late = _joined(steps[:-RECENT]), _joined(steps[-RECENT:])
    if not (_is_enough(early) and _is_enough(late)):
        return None
    # A hacked goal is often learned first, so the best early step is a possible baseline too.
    begins = [early, *(rows for rows in steps[:-RECENT] if _is_enough(rows))]
    begin = min(begins, key=lambda rows: _moved(rows, late))
    before, now = (fmean(value for _, _, value in rows) for rows in (begin, late))
    if before <= 0:
        return None
    old, new = (_correlated(rows) for rows in (early, late))
    return TrackedComponent(
        name=name,
        before=before,
        now=now,
        spread=pstdev(value for _, _, value in (*early, *late)),
        change=_moved(begin, late),
        has_risen=_moved(early, late) > _RISEN,
        correlation=None if new is None else new[0],
        parting=0.0 if old is None or new is None else _parted(old, new),
        against=0.0 if new is None else _fisher(new[0]) * math.sqrt(new[1] - 3),
        examples=tuple(_examples(late, before)),
    )


def growth_paid(record: RunRecord) -> Iterator[tuple[str, float, float, float]]:
    """Properties of responses that grew strongly and correlate with the reward."""
    steps = _steps(record)
    early, late = _joined(steps[:-RECENT]), _joined(steps[-RECENT:])
    for what, measure, has_grown in (
        ("response length", _length, _is_longer),
        ("the share of repeated 3-grams", _repetition, _is_repeating),
    ):
        rows = [(measure(r.rollout), _value(r.rollout.score)) for r in (*early, *late)]
        pairs = [(amount, value) for amount, value in rows if value is not None]
        if not early or not late or not pairs:
            continue
        before, now = (fmean(measure(r.rollout) for r in side) for side in (early, late))
        found = correlation(pairs)
        if has_grown(before, now) and found is not None and found > _FOLLOWS:
            yield what, before, now, found


_Row = tuple[RecordedRollout, float, float]
"""A rollout, its whole reward, and the watched component."""


def _steps(record: RunRecord) -> list[list[RecordedRollout]]:
    """Rollouts of each step that is read; the last `RECENT` of them are the latest."""
    return list(record.rollouts.values())


def _joined(steps: Sequence[Sequence[_T]]) -> list[_T]:
    return [row for rows in steps for row in rows]


def _is_enough(rows: Sequence[_Row]) -> bool:
    return len(_by_group(rows)) >= _FEWEST


def _judged(rows: Sequence[RecordedRollout], name: str | None) -> list[_Row]:
    """Rollouts that have both; without a name the reward is compared with itself."""
    found: list[_Row] = []
    for row in rows:
        score = row.rollout.score
        part = score
        if score is not None and name is not None:
            part = next((p for p in score.parts if p.name == name), None)
        whole, value = _value(score), _value(part)
        if whole is not None and value is not None and part is not None and not part.gated:
            found.append((row, whole, value))
    return found


def _by_group(rows: Sequence[_Row]) -> dict[str, list[_Row]]:
    """Rollouts by group: samples of one prompt are not independent, so groups are counted."""
    groups: dict[str, list[_Row]] = {}
    for row in rows:
        groups.setdefault(str(row[0].rollout.group), []).append(row)
    return groups


def _moved(early: Sequence[_Row], late: Sequence[_Row]) -> float:
    """Difference of the means of groups in standard errors, as a normal variable would have it.

    Welch's t with Satterthwaite's degrees of freedom: the variance of few groups is uncertain, so
    their t is scaled down.
    """
    means = [[fmean(r[2] for r in g) for g in _by_group(rows).values()] for rows in (early, late)]
    errors = [variance(side) / len(side) for side in means]
    difference = fmean(means[1]) - fmean(means[0])
    if not sum(errors):
        return math.copysign(math.inf, difference) if difference else 0.0
    t = difference / math.sqrt(sum(errors))
    pairs = zip(errors, means, strict=True)
    freedom = sum(errors) ** 2 / sum(e * e / (len(side) - 1) for e, side in pairs)
    return t * (1 - 1 / (4 * freedom)) / math.sqrt(1 + t * t / (2 * freedom))


def _correlated(rows: Sequence[_Row]) -> tuple[float, int] | None:
    """Correlation of reward and component, and the number of groups."""
    found = correlation([(whole, value) for _, whole, value in rows])
    return None if found is None else (found, len(_by_group(rows)))


def _parted(old: tuple[float, int], new: tuple[float, int]) -> float:
    """Difference of two correlations over its standard error."""
    error = math.sqrt(1 / (old[1] - 3) + 1 / (new[1] - 3))
    return (_fisher(new[0]) - _fisher(old[0])) / error


def _fisher(value: float) -> float:
    """Fisher's transform: its variance is 1 / (count - 3), whatever the correlation is."""
    return math.atanh(max(-0.999, min(0.999, value)))


def _examples(late: Sequence[_Row], before: float) -> Iterator[str]:
    poor = [row for row in late if row[2] < before]
    for row, whole, _ in sorted(poor, key=lambda row: -row[1])[:_SHOWN]:
        yield f"{name_of(row)}: reward {whole:.3g} for {row.rollout.text[:60]!r}"


def _value(score: Score | None) -> float | None:
    return None if score is None else score.value


def _length(rollout: Rollout) -> float:
    return float(rollout.response_length)


def _repetition(rollout: Rollout) -> float:
    """Share of the n-grams of sampled tokens that occurred before."""
    tokens = [
        token
        for branch in rollout.branches
        for token, source in zip(branch.tokens, branch.sources, strict=True)
        if source == Source.SAMPLED
    ]
    grams = [tuple(tokens[i : i + _NGRAM]) for i in range(len(tokens) - _NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _is_longer(before: float, now: float) -> bool:
    return now > max(_LONGER * before, before + _MORE_TOKENS)


def _is_repeating(before: float, now: float) -> bool:
    return now > before + _REPEATED


_RISE = 0.2
"""Rise of the training reward, and fall of what is watched, in its own spread, that counts; a
smaller rise counts where it is certain."""
_FALL, _SHARE = 0.1, 0.5
"""Absolute and relative fall of a trained component that counts: components may be traded for one
another, so only a severe loss does."""
_CERTAIN = 4.0
"""Standard errors. A run is diagnosed repeatedly, with several components each time; at four (1 in
30000) a hundred diagnoses of a healthy run raise a false alarm once in some hundred runs."""
_PARTED = 0.1
"""Correlation below which the reward is unrelated to a component."""


@rule("reward-hacking", "warning", steps=2 * WINDOW)
def reward_hacking(record: RunRecord) -> Iterator[Symptom]:
    """The training reward rises while what it stands for does not."""
    reward, spread = record.series("reward/mean"), record.series("reward/std")
    if not reward.has_both_ends or not spread.has_both_ends:
        return
    rise = reward.end() - reward.start()
    if rise <= _RISE * spread.start() and not (rise > 0 and reward_rise(record) > _CERTAIN):
        return
    rose = f"the training reward rose from {reward.start():.3g} to {reward.end():.3g} while "
    watched = [watched_in(record, name) for name in _watched_names(record)]
    known = [one for one in watched if one is not None]
    seen = [*_validation_drop(record), *_lost(record), *(s for one in known for s in _apart(one))]
    if not any(one.has_risen for one in known):
        seen += _paid_growth(record)
    for what, numbers in seen:
        yield Symptom(
            says=rose + what,
            experiment=_remedy(record),
            steps=reward.last_steps,
            numbers={"reward/mean": reward.end(), **numbers},
            rollouts=next((one.examples for one in known if one.examples), ()),
        )


_Seen = tuple[str, Mapping[str, float]]
"""What did not rise, and its numbers."""


def _validation_drop(record: RunRecord) -> Iterator[_Seen]:
    """Validation accuracy, where its interval lies below the first one."""
    found = [line.values for line in record.lines if "val/accuracy" in line.values]
    if len(found) >= 2 and found[-1]["val/accuracy_high"] < found[0]["val/accuracy_low"]:
        before, now = (line["val/accuracy"] for line in (found[0], found[-1]))
        numbers = {"val/accuracy": now, "val/accuracy at the beginning": before}
        yield f"val/accuracy fell from {before:.3g} to {now:.3g}", numbers


def _lost(record: RunRecord) -> Iterator[_Seen]:
    """Components that lost at least half of what they had."""
    named = set(_watched_names(record))
    for name in record.names():
        path = name.removeprefix("reward/").removesuffix("/mean")
        if not (name.startswith("reward/") and name.endswith("/mean")) or path in named:
            continue
        curve = record.series(name)
        if curve.has_both_ends and curve.start() > 0:
            before, now = curve.start(), curve.end()
            if before - now > max(_FALL, _SHARE * before):
                numbers = {name: now, f"{name} at the beginning": before}
                yield f"{name} fell from {before:.3g} to {now:.3g}", numbers


def _apart(one: TrackedComponent) -> Iterator[_Seen]:
    """A component of weight 0 that falls, or no longer correlates with the reward."""
    name = f"reward/{one.name}/mean"
    numbers = {name: one.now, f"{name} at the beginning": one.before, "standard errors": one.change}
    if one.change < -_CERTAIN and one.before - one.now > _RISE * one.spread:
        yield f"{name}, which is watched, fell from {one.before:.3g} to {one.now:.3g}", numbers
        return
    if one.has_risen or one.correlation is None:
        return
    numbers |= {"correlation": one.correlation}
    has_parted = one.parting < -_CERTAIN and one.correlation < _PARTED
    if has_parted or one.against < -_CERTAIN:
        yield (
            f"{name}, which is watched, stayed at {one.now:.3g}, and its correlation with the "
            f"reward is {one.correlation:.2f}",
            numbers,
        )


def _paid_growth(record: RunRecord) -> Iterator[_Seen]:
    """Length or repetition that a learned reward pays for; verifiers are not checked."""
    if has_proxy(record.config.reward):
        for what, before, now, correlation in growth_paid(record):
            yield (
                f"{what} rose from {before:.3g} to {now:.3g}, and the reward follows it "
                f"(correlation {correlation:.2f})",
                {what: now, f"{what} at the beginning": before, "correlation": correlation},
            )


def _watched_names(record: RunRecord) -> list[str]:
    """Components that the configuration gives a weight of 0."""
    components, _ = read_components(record.config.reward)
    return [name for name, component in components.items() if component.weight == 0]


def _remedy(record: RunRecord) -> Experiment:
    look = "read the best rollouts of the last steps: what earns the reward is not the task"
    kl = more_kl(record.config)
    rest = [] if kl is None else [f"{kl}, to stay where the reward was learned"]
    if has_proxy(record.config.reward):
        again = "teach the reward model with pairs in which such answers lose"
        return change_data(look, again, *rest)
    return change_data(look, "give what fell a weight of its own in reward.components", *rest)
