"""Rules about what there is to learn from: differences of reward, and tokens that get them."""

from collections.abc import Iterator, Sequence

from luyen.base.bars import reaches
from luyen.base.records import Source
from luyen.studio.doctor.course import WINDOW
from luyen.studio.doctor.findings import Symptom, rule
from luyen.studio.doctor.read import RunRecord
from luyen.studio.doctor.rollouts import name_of, solved_groups, used_tokens
from luyen.studio.doctor.tuning import other_data, repair

_MOSTLY = 0.8
"""Share of groups without a difference: four fifths of the generated tokens teach nothing."""
_FEW_KEPT = 0.2
"""Share of kept groups below which a step costs five times what it trains on."""
_HARD = 0.9
"""Share of groups without any success: nine of ten prompts only cost time."""


@rule("zero-variance-groups", "warning", steps=WINDOW)
def zero_variance_groups(record: RunRecord) -> Iterator[Symptom]:
    """Most groups have samples that all score the same."""
    flat = record.course("group/zero_std_fraction")
    if not flat.has_end or flat.end() < _MOSTLY:
        return
    is_solved = solved_groups(record).all_share >= _MOSTLY
    yield Symptom(
        says=f"{flat.end():.0%} of the groups score alike in the last {WINDOW} steps"
        + (": they are solved" if is_solved else ", so that most advantages are 0"),
        experiment=other_data(
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
    low, high = record.course("reward/min"), record.course("reward/max")
    if not low.has_end or low.values[-WINDOW:] != high.values[-WINDOW:]:
        return
    is_solved = reaches(low.end(), 1.0) and low.values != high.values
    yield Symptom(
        says=f"every rollout of the last {WINDOW} steps scores {low.end():g}",
        experiment=other_data("stop here, or take harder rows")
        if is_solved
        else repair("look at rollouts/: does the reward read the right text and ground truth?"),
        steps=low.last_steps,
        numbers={"reward/min": low.end(), "reward/max": high.end()},
        severity="note" if is_solved else None,
    )


@rule("all-cut-and-alike", "warning", steps=2)
def all_cut_and_alike(record: RunRecord) -> Iterator[Symptom]:
    """Every answer is cut off, and every reward is the same: nothing can be learned."""
    low, high = record.course("reward/min"), record.course("reward/max")
    cut = record.course("response_length/cut_fraction")
    # With a window of steps `reward-all-equal` and `truncation` say it, each for itself.
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
        experiment=repair("mend what builds the batch: the mask is `source == sampled`"),
        steps=tuple(sorted({step for step, _ in where})),
        numbers={"rollouts": float(len(where))},
        rollouts=tuple(name for _, name in where[:3]),
    )


@rule("starvation", "warning", steps=WINDOW)
def starvation(record: RunRecord) -> Iterator[Symptom]:
    """Most of what is generated is thrown away, or most prompts are never solved."""
    kept = record.course("group/kept_fraction")
    if kept.has_end and kept.end() < _FEW_KEPT:
        yield Symptom(
            says=f"{kept.end():.0%} of the generated groups are trained on",
            experiment=other_data(
                "take rows of which the policy solves some and not all",
                f"actor_rollout_ref.rollout.n={2 * record.config.actor_rollout_ref.rollout.n}",
            ),
            steps=kept.last_steps,
            numbers={"group/kept_fraction": kept.end()},
        )
    best, solved = record.course("reward/max"), solved_groups(record)
    # Only where a reward of 1 is reached at all does "not solved" mean anything.
    reached = [
        step for step, value in zip(best.steps, best.values, strict=True) if reaches(value, 1.0)
    ]
    if best.has_both_ends and solved.none_share >= _HARD and reached:
        yield Symptom(
            says=f"{solved.none} of {solved.groups} groups hold no solution, though step "
            f"{reached[-1]} reached reward 1: hard prompts are drawn and teach nothing",
            experiment=other_data("data.sampler.name=curriculum, or easier rows first"),
            steps=best.last_steps,
            numbers={"groups": float(solved.groups), "without a solution": float(solved.none)},
        )
