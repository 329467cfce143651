"""Rules about the reward: which part of it decides, and whether it still means what it should."""

from collections.abc import Iterator
from statistics import pstdev

from luyen.studio.doctor.findings import Symptom, rule
from luyen.studio.doctor.read import RunRecord
from luyen.studio.doctor.tuning import other_data, repair

_DOMINANT = 20.0
"""Times the spread of any other component: the others are lost in its noise."""
_RISE = 0.2
"""Rise of the training reward, in its own spread, that counts as progress."""
_FALL, _SHARE = 0.1, 0.5
"""Fall of a component, and share of it that is gone, while the whole rises."""
_BROKEN = 0.1
"""Share of rollouts without a score: one in ten is no accident."""


@rule("reward-dominance", "warning")
def reward_dominance(record: RunRecord) -> Iterator[Symptom]:
    """One component of the reward drowns the others."""
    columns: dict[str, list[float]] = {}
    for rollouts in record.rollouts.values():
        for recorded in rollouts:
            score = recorded.rollout.score
            for part in score.parts if score is not None else ():
                if part.value is not None and part.weight != 0:
                    columns.setdefault(part.name, []).append(part.weight * part.value)
    # A component that never varies (a format that everyone keeps) has nothing to be drowned.
    spreads = {n: s for n, v in columns.items() if (s := pstdev(v)) > 0}
    if len(spreads) < 2:
        return
    first, second = sorted(spreads, key=lambda name: spreads[name], reverse=True)[:2]
    if spreads[first] > _DOMINANT * spreads[second]:
        yield Symptom(
            says=f"`{first}` spreads by {spreads[first]:.3g} and `{second}` by "
            f"{spreads[second]:.3g}, weights included: only the first is learned",
            experiment=other_data(
                f"lower reward.components.{first}.weight until the spreads are of one size",
                "algorithm.adv_estimator=gdpo, which normalises each component",
            ),
            steps=tuple(record.rollouts),
            numbers={f"spread of {name}": value for name, value in spreads.items()},
        )


@rule("reward-hacking", "warning")
def reward_hacking(record: RunRecord) -> Iterator[Symptom]:
    """The training reward rises while what it stands for falls."""
    reward, spread = record.course("reward/mean"), record.course("reward/std")
    if not reward.has_both_ends or not spread.has_both_ends:
        return
    rise = reward.end() - reward.start()
    if rise <= _RISE * spread.start():
        return
    for what, before, now in (*_held_out(record), *_components(record)):
        yield Symptom(
            says=f"the training reward rose from {reward.start():.3g} to {reward.end():.3g} while "
            f"{what} fell from {before:.3g} to {now:.3g}",
            experiment=other_data(
                "read the best rollouts of the last steps: what earns the reward is not the task",
                f"give {what} a weight of its own in reward.components",
            ),
            steps=reward.last_steps,
            numbers={"reward/mean": reward.end(), what: now, f"{what} at the beginning": before},
        )


def _held_out(record: RunRecord) -> Iterator[tuple[str, float, float]]:
    """Validation accuracy, where its interval lies below the first one."""
    found = [line.values for line in record.lines if "val/accuracy" in line.values]
    if len(found) >= 2 and found[-1]["val/accuracy_high"] < found[0]["val/accuracy_low"]:
        yield "val/accuracy", found[0]["val/accuracy"], found[-1]["val/accuracy"]


def _components(record: RunRecord) -> Iterator[tuple[str, float, float]]:
    """Components that lost at least half of what they had."""
    for name in record.names():
        if not (name.startswith("reward/") and name.endswith("/mean")):
            continue
        course = record.course(name)
        if course.has_both_ends and course.start() > 0:
            fall = course.start() - course.end()
            if fall > max(_FALL, _SHARE * course.start()):
                yield name, course.start(), course.end()


@rule("many-faults", "warning")
def many_faults(record: RunRecord) -> Iterator[Symptom]:
    """Many rollouts break or cannot be scored."""
    config = record.config
    batches = record.course("group/generated_batches")
    each = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    drawn = each * (batches.end() if batches.has_end else 1.0)
    for name in ("reward/faults", "turns/faults"):
        faults = record.course(name)
        if faults.has_end and faults.end() > _BROKEN * drawn:
            yield Symptom(
                says=f"{name} is {faults.end():g} of {drawn:g} rollouts a step",
                experiment=repair(
                    "read the column `fault` in rollouts/, and raise reward.timeout_s or "
                    "multi_turn.tool_timeout_s if it is time that runs out"
                ),
                steps=faults.last_steps,
                numbers={name: faults.end(), "rollouts": drawn},
                rollouts=_broken(record),
            )


def _broken(record: RunRecord) -> tuple[str, ...]:
    found = [r.rollout for rows in record.rollouts.values() for r in rows if r.rollout.fault]
    return tuple(f"{r.group}/{r.sample}: {(r.fault or '')[:80]}" for r in found[:3])
