"""The rule about rewards that are earned by something else than what they stand for.

A reward is compared with what the run measures beside it: held-out accuracy, its own components,
and above all components of weight 0, which are watched and not learned from.
"""

from collections.abc import Iterator, Mapping

from luyen.config.reward_parts import read_components
from luyen.studio.doctor.course import WINDOW
from luyen.studio.doctor.findings import Experiment, Symptom, rule
from luyen.studio.doctor.proxies import (
    Watched,
    growth_paid,
    has_proxy,
    reward_rise,
    watched_in,
)
from luyen.studio.doctor.read import RunRecord
from luyen.studio.doctor.tuning import more_kl, other_data

_RISE = 0.2
"""Rise of the training reward, and fall of what is watched, in its own spread, that counts; a
smaller rise counts where it is certain."""
_FALL, _SHARE = 0.1, 0.5
"""Fall of a component that is learned, and share of it that is gone: parts may be traded for one
another, so only a loss that nobody would accept counts."""
_CERTAIN = 4.0
"""Standard errors. A run is looked at again and again, with several components each time; at four
(1 in 30000) a hundred looks at a healthy run raise an alarm once in some hundred runs."""
_PARTED = 0.1
"""Correlation below which the reward says nothing about what it stands for."""


@rule("reward-hacking", "warning", steps=2 * WINDOW)
def reward_hacking(record: RunRecord) -> Iterator[Symptom]:
    """The training reward rises while what it stands for does not."""
    reward, spread = record.course("reward/mean"), record.course("reward/std")
    if not reward.has_both_ends or not spread.has_both_ends:
        return
    rise = reward.end() - reward.start()
    if rise <= _RISE * spread.start() and not (rise > 0 and reward_rise(record) > _CERTAIN):
        return
    rose = f"the training reward rose from {reward.start():.3g} to {reward.end():.3g} while "
    watched = [watched_in(record, name) for name in _watched_names(record)]
    known = [one for one in watched if one is not None]
    seen = [*_held_out(record), *_lost(record), *(s for one in known for s in _apart(one))]
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


def _held_out(record: RunRecord) -> Iterator[_Seen]:
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
        course = record.course(name)
        if course.has_both_ends and course.start() > 0:
            before, now = course.start(), course.end()
            if before - now > max(_FALL, _SHARE * before):
                numbers = {name: now, f"{name} at the beginning": before}
                yield f"{name} fell from {before:.3g} to {now:.3g}", numbers


def _apart(one: Watched) -> Iterator[_Seen]:
    """A watched component that falls, or that the reward has nothing to do with any more."""
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
    """Length or repetition that a learned reward pays for; a verifier pays for what is right."""
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
        return other_data(look, again, *rest)
    return other_data(look, "give what fell a weight of its own in reward.components", *rest)
