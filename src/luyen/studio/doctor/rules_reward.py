"""Rules about the reward: which part of it decides, and whether it can be computed."""

from collections.abc import Iterator
from statistics import pstdev

from luyen.studio.doctor.course import WINDOW
from luyen.studio.doctor.findings import Symptom, rule
from luyen.studio.doctor.read import RunRecord
from luyen.studio.doctor.tuning import other_data, repair

_DOMINANT = 20.0
"""Times the spread of any other component: the others are lost in its noise."""
_RISEN = 0.01
"""Share of rewards that fail: below one in a hundred a rise is chance."""
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


@rule("many-faults", "warning", steps=WINDOW)
def many_faults(record: RunRecord) -> Iterator[Symptom]:
    """Many rollouts break or cannot be scored."""
    drawn = _drawn(record)
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


@rule("rising-faults", "warning", steps=2 * WINDOW)
def rising_faults(record: RunRecord) -> Iterator[Symptom]:
    """More and more rewards cannot be computed as the run goes on."""
    faults, drawn = record.course("reward/faults"), _drawn(record)
    if not faults.has_both_ends:
        return
    before, now = faults.start() / drawn, faults.end() / drawn
    if now >= _RISEN and now > 2 * before:
        yield Symptom(
            says=f"{before:.1%} of the rewards of a step failed at first, and {now:.1%} do now",
            experiment=repair(
                "read the column `fault` in rollouts/: the policy may have found answers that the "
                "reward code cannot take, or a judge or sandbox is overloaded"
            ),
            steps=faults.last_steps,
            numbers={"share at first": before, "share now": now},
            rollouts=_broken(record),
        )


def _drawn(record: RunRecord) -> float:
    """Rollouts of a step."""
    config, batches = record.config, record.course("group/generated_batches")
    each = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    return each * (batches.end() if batches.has_end else 1.0)


def _broken(record: RunRecord) -> tuple[str, ...]:
    found = [r.rollout for rows in record.rollouts.values() for r in rows if r.rollout.fault]
    return tuple(f"{r.group}/{r.sample}: {(r.fault or '')[:80]}" for r in found[:3])
