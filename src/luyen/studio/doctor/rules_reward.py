"""Rules about the reward: differences to learn from, dominant parts, faults, masks."""

from collections.abc import Iterator, Sequence
from statistics import pstdev

from luyen.base.records import Source, reaches
from luyen.studio.doctor.findings import Symptom, change_data, repair, rule
from luyen.studio.doctor.record import WINDOW, RunRecord, name_of, solved_groups, used_tokens

_DOMINANT = 20.0
"""Factor over the spread of every other component, whose signal is then lost in its noise."""
_RISEN = 0.01
"""Share of failed rewards: below one in a hundred a rise may be chance."""
_BROKEN = 0.1
"""Share of rollouts without a score: one in ten is no accident."""


@rule("reward-dominance", "warning")
def reward_dominance(record: RunRecord) -> Iterator[Symptom]:
    """One component of the reward dominates all other components."""
    columns: dict[str, list[float]] = {}
    for rollouts in record.rollouts.values():
        for recorded in rollouts:
            score = recorded.rollout.score
            for part in score.parts if score is not None else ():
                if part.value is not None and part.weight != 0:
                    columns.setdefault(part.name, []).append(part.weight * part.value)
    # A component that never varies (a format that is always kept) cannot be dominated.
    spreads = {n: s for n, v in columns.items() if (s := pstdev(v)) > 0}
    if len(spreads) < 2:
        return
    first, second = sorted(spreads, key=lambda name: spreads[name], reverse=True)[:2]
    if spreads[first] > _DOMINANT * spreads[second]:
        yield Symptom(
            says=f"`{first}` spreads by {spreads[first]:.3g} and `{second}` by "
            f"{spreads[second]:.3g}, weights included: only the first is learned",
            experiment=change_data(
                f"lower reward.components.{first}.weight until the spreads are of one size",
                "algorithm.adv_estimator=gdpo, which normalises each component",
            ),
            steps=tuple(record.rollouts),
            numbers={f"spread of {name}": value for name, value in spreads.items()},
        )


@rule("many-faults", "warning", steps=WINDOW)
def many_faults(record: RunRecord) -> Iterator[Symptom]:
    """Many rollouts break or cannot be scored."""
    total = _rollouts_per_step(record)
    for name in ("reward/faults", "turns/faults"):
        faults = record.series(name)
        if faults.has_end and faults.end() > _BROKEN * total:
            yield Symptom(
                says=f"{name} is {faults.end():g} of {total:g} rollouts a step",
                experiment=repair(
                    "read the column `fault` in rollouts/, and raise reward.timeout_s or "
                    "multi_turn.tool_timeout_s if it is time that runs out"
                ),
                steps=faults.last_steps,
                numbers={name: faults.end(), "rollouts": total},
                rollouts=_broken(record),
            )


@rule("rising-faults", "warning", steps=2 * WINDOW)
def rising_faults(record: RunRecord) -> Iterator[Symptom]:
    """More and more rewards cannot be computed as the run goes on."""
    faults, total = record.series("reward/faults"), _rollouts_per_step(record)
    if not faults.has_both_ends:
        return
    before, now = faults.start() / total, faults.end() / total
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


def _rollouts_per_step(record: RunRecord) -> float:
    """Generated rollouts per step."""
    config, batches = record.config, record.series("group/generated_batches")
    each = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    return each * (batches.end() if batches.has_end else 1.0)


def _broken(record: RunRecord) -> tuple[str, ...]:
    found = [r.rollout for rows in record.rollouts.values() for r in rows if r.rollout.fault]
    return tuple(f"{r.group}/{r.sample}: {(r.fault or '')[:80]}" for r in found[:3])


# Rules about the training signal: reward differences, and the tokens that get them.

_MOSTLY = 0.8
"""Share of groups without a difference: four fifths of the generated tokens teach nothing."""
_FEW_KEPT = 0.2
"""Share of kept groups below which a step costs five times what it trains on."""
_HARD = 0.9
"""Share of groups without any success: nine of ten prompts only cost time."""


@rule("zero-variance-groups", "warning", steps=WINDOW)
def zero_variance_groups(record: RunRecord) -> Iterator[Symptom]:
    """Most groups have samples that all score the same."""
    flat = record.series("group/zero_std_fraction")
    if not flat.has_end or flat.end() < _MOSTLY:
        return
    is_solved = solved_groups(record).all_share >= _MOSTLY
    yield Symptom(
        says=f"{flat.end():.0%} of the groups score alike in the last {WINDOW} steps"
        + (": they are solved" if is_solved else ", so that most advantages are 0"),
        experiment=change_data(
            "take harder rows" if is_solved else "take rows of another difficulty",
            "algorithm.filter_groups.enable=true",
            f"actor_rollout_ref.rollout.n={2 * record.config.actor_rollout_ref.rollout.n}",
        ),
        steps=flat.last_steps,
        numbers={"group/zero_std_fraction": flat.end()},
        severity="note" if is_solved else None,
    )


@rule("reward-all-equal", "error", steps=WINDOW)
def reward_all_equal(record: RunRecord) -> Iterator[Symptom]:
    """Every rollout gets the same reward."""
    low, high = record.series("reward/min"), record.series("reward/max")
    if not low.has_end or low.values[-WINDOW:] != high.values[-WINDOW:]:
        return
    is_solved = reaches(low.end(), 1.0) and low.values != high.values
    yield Symptom(
        says=f"every rollout of the last {WINDOW} steps scores {low.end():g}",
        experiment=change_data("stop here, or take harder rows")
        if is_solved
        else repair("look at rollouts/: does the reward read the right text and ground truth?"),
        steps=low.last_steps,
        numbers={"reward/min": low.end(), "reward/max": high.end()},
        severity="note" if is_solved else None,
    )


@rule("all-cut-and-alike", "warning", steps=2)
def all_cut_and_alike(record: RunRecord) -> Iterator[Symptom]:
    """Every answer is cut off, and every reward is the same: nothing can be learned."""
    low, high = record.series("reward/min"), record.series("reward/max")
    cut = record.series("response_length/cut_fraction")
    # With a full window of steps, `reward-all-equal` and `truncation` report it.
    if not 2 <= len(low) < WINDOW or low.values != high.values or len({*low.values}) > 1:
        return
    if len(cut) == len(low) and min(cut.values) == 1.0:
        longer = 2 * record.config.data.max_response_length
        yield Symptom(
            says=f"in all {len(low)} steps every answer ends at the token budget and scores "
            f"{low.values[0]:g}",
            experiment=repair(
                f"data.max_response_length={longer}, or a prompt that asks for short answers; then "
                "look at rollouts/: does the reward find an answer in the text that is there?"
            ),
            steps=low.steps,
            numbers={"reward": low.values[0], "response_length/cut_fraction": 1.0},
        )


@rule("empty-mask", "error")
def empty_mask(record: RunRecord) -> Iterator[Symptom]:
    """Tokens that the policy sampled are not trained on."""
    missing = [
        (step, name_of(recorded))
        for step, rollouts in record.rollouts.items()
        for recorded in rollouts
        if any(s == Source.SAMPLED and a is None for s, a in used_tokens(recorded))
    ]
    if missing:
        says = f"sampled tokens without an advantage in {len(missing)} rollouts that were used"
        yield _mask_symptom(says, missing)


@rule("inverted-mask", "error")
def inverted_mask(record: RunRecord) -> Iterator[Symptom]:
    """Tokens that the policy did not sample are trained on."""
    wrong = [
        (step, name_of(recorded))
        for step, rollouts in record.rollouts.items()
        for recorded in rollouts
        if any(s != Source.SAMPLED and a is not None for s, a in used_tokens(recorded))
    ]
    if wrong:
        says = f"advantages on prompt, tool or template tokens in {len(wrong)} rollouts"
        yield _mask_symptom(says, wrong)


def _mask_symptom(says: str, where: Sequence[tuple[int, str]]) -> Symptom:
    return Symptom(
        says=says,
        experiment=repair("fix the code that builds the batch: the mask is `source == sampled`"),
        steps=tuple(sorted({step for step, _ in where})),
        numbers={"rollouts": float(len(where))},
        rollouts=tuple(name for _, name in where[:3]),
    )


@rule("starvation", "warning", steps=WINDOW)
def starvation(record: RunRecord) -> Iterator[Symptom]:
    """Most of what is generated is thrown away, or most prompts are never solved."""
    kept = record.series("group/kept_fraction")
    if kept.has_end and kept.end() < _FEW_KEPT:
        yield Symptom(
            says=f"{kept.end():.0%} of the generated groups are trained on",
            experiment=change_data(
                "take rows of which the policy solves some and not all",
                f"actor_rollout_ref.rollout.n={2 * record.config.actor_rollout_ref.rollout.n}",
            ),
            steps=kept.last_steps,
            numbers={"group/kept_fraction": kept.end()},
        )
    best, solved = record.series("reward/max"), solved_groups(record)
    # Only where a reward of 1 is reached at all does "not solved" mean anything.
    reached = [
        step for step, value in zip(best.steps, best.values, strict=True) if reaches(value, 1.0)
    ]
    if best.has_both_ends and solved.none_share >= _HARD and reached:
        yield Symptom(
            says=f"{solved.none} of {solved.groups} groups hold no solution, though step "
            f"{reached[-1]} reached reward 1: hard prompts are sampled and teach nothing",
            experiment=change_data("data.sampler.name=curriculum, or easier rows first"),
            steps=best.last_steps,
            numbers={"groups": float(solved.groups), "without a solution": float(solved.none)},
        )
