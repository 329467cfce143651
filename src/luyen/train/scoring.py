"""Score the rollouts of a step: fault policy, dynamic sampling, greedy baselines (ReMax)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import pstdev
from typing import final

from luyen.base.errors import UserError
from luyen.base.records import Rollout, Score
from luyen.rewards.scoring import ScoredGroup, ScoreJournal
from luyen.rollout.single_turn import Group
from luyen.runtime.generation import RolloutFuture
from luyen.telemetry.progress import PROGRESS
from luyen.train.rollouts import RolloutHandle
from luyen.train.run import OnlineRun


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredRollouts:
    """The rollouts of a step, or of one of its batches.

    Example:
        >>> ScoredRollouts(groups=(), scored=(), broken=(), baselines={}).metrics
        {}
    """

    groups: Sequence[Group]
    """Groups that are trained on."""
    scored: Sequence[ScoredGroup]
    """All groups with scores, those that are dropped included."""
    broken: Sequence[Rollout]
    """Rollouts that failed, which have no score."""
    baselines: Mapping[str, float]
    """Rewards of greedy rollouts by group (ReMax)."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """How many batches were generated, and the share of groups that is trained on."""


def generate_and_score(run: OnlineRun, step: int) -> ScoredRollouts:
    """Generate and score the groups of a step; `filter_groups` drops groups of equal scores.

    Batches are generated until the step is full, or every row was tried without a further group. A
    UserError when no group is left, or when `max_num_gen_batches` batches do not fill the step.
    """
    wanted, filter_groups = run.config.data.train_batch_size, run.config.algorithm.filter_groups
    most = filter_groups.max_num_gen_batches if filter_groups.enable else 1
    kept: list[Group] = []
    batches: list[ScoredRollouts] = []
    idle = 0
    handle: RolloutHandle | None = None
    with run.phase("generate"):
        run.submit_ahead(step)
    while len(kept) < wanted and not (batches and len(batches) == most):
        with run.phase("generate"):
            handle = run.scheduler.take(step, before=handle)
        batches.append(_score_batch(run, handle))
        fresh = [group for group in batches[-1].groups if _has_signal(group, run)]
        idle = 0 if fresh else idle + 1
        kept += fresh
        if idle * wanted >= len(run.data.train.prompts):
            break  # every row was tried since the last group with a signal
    run.scheduler.release()
    is_short = filter_groups.enable and len(batches) == most and len(kept) < wanted
    if is_short or not kept:
        raise _too_few_groups(len(kept), wanted, len(batches), filter_groups.max_num_gen_batches)
    return ScoredRollouts(
        groups=kept[:wanted],
        scored=[group for batch in batches for group in batch.scored],
        broken=[rollout for batch in batches for rollout in batch.broken],
        baselines={name: value for batch in batches for name, value in batch.baselines.items()},
        metrics={
            "group/generated_batches": float(len(batches)),
            "group/kept_fraction": len(kept) / (len(batches) * wanted),
        },
    )


def _too_few_groups(kept: int, wanted: int, batches: int, most: int) -> UserError:
    few = f"{kept} of the {wanted} groups of a step have" if kept else "no group of them has"
    return UserError(
        "algorithm.filter_groups.max_num_gen_batches",
        most,
        f"{batches} batches were generated and {few} samples that score differently",
        "choose easier or harder rows, raise rollout.n, or allow more batches (0: no limit)",
    )


def _score_batch(run: OnlineRun, handle: RolloutHandle) -> ScoredRollouts:
    """Wait for a batch and score it, greedy baselines included."""
    run.use_journal(handle.journal)
    with run.phase("generate"), PROGRESS.watching("rollout", handle.slot.step):
        sampled = handle.sampled.result()
    with run.phase("score"):
        batch = score_and_filter(run, sampled)
    if handle.greedy is None:
        return batch
    baselines, broken = _greedy_rewards(run, handle.greedy)
    return replace(
        batch,
        groups=[group for group in batch.groups if _has_baseline(group, baselines)],
        broken=[*batch.broken, *broken],
        baselines=baselines,
    )


def score_and_filter(run: OnlineRun, groups: Sequence[Group]) -> ScoredRollouts:
    """Score the groups; rollouts that failed or could not be scored are not trained on."""
    scored, broken = score_groups(run, groups) if run.rules.needs.reward else _unscored(run, groups)
    faulty = {rollout.key for rollout in run.reward.apply_fault_policy(scored)}
    kept = [_without(Group(prompt=g.prompt, rollouts=g.rollouts), faulty) for g in scored]
    return ScoredRollouts(groups=kept, scored=scored, broken=broken, baselines={})


def score_groups(
    run: OnlineRun, groups: Sequence[Group], *, purpose: str = "rollout"
) -> tuple[list[ScoredGroup], list[Rollout]]:
    """Score every group; failed rollouts are removed first, and returned unscored."""
    valid, broken = _valid_groups(run, groups, purpose)
    pairs = [(group.prompt, group.rollouts) for group in valid]
    PROGRESS.expect("score", 0, len(pairs), restart=True)
    with PROGRESS.watching("score", 0):
        scored = run.reward.score(pairs, ScoreJournal(journal=run.journal, purpose=purpose))
    return scored, broken


def _unscored(run: OnlineRun, groups: Sequence[Group]) -> tuple[list[ScoredGroup], list[Rollout]]:
    """Groups without scores, for pure distillation, and failed rollouts."""
    valid, broken = _valid_groups(run, groups, "rollout")
    scored = [
        ScoredGroup(prompt=g.prompt, rollouts=g.rollouts, seconds=(None,) * len(g.rollouts))
        for g in valid
    ]
    return scored, broken


def _valid_groups(
    run: OnlineRun, groups: Sequence[Group], purpose: str
) -> tuple[list[Group], list[Rollout]]:
    """The groups without failed rollouts, and these; empty groups are dropped.

    A failed greedy baseline has the address of sample 0, so it is recorded as sample `n`.
    """
    generation = run.roles.generation
    keys = {rollout.key for rollout in generation.broken(groups, purpose=purpose)}
    bad = [generation.compared(r, g.prompt) for g in groups for r in g.rollouts if r.key in keys]
    if purpose == "greedy":
        number = run.config.actor_rollout_ref.rollout.n
        bad = [replace(rollout, sample=number) for rollout in bad]
    valid = [_without(group, keys) for group in groups]
    return [group for group in valid if group.rollouts], bad


def _without(group: Group, left_out: set[tuple[int, int, str, int]]) -> Group:
    kept = tuple(rollout for rollout in group.rollouts if rollout.key not in left_out)
    return Group(prompt=group.prompt, rollouts=kept)


def _has_signal(group: Group, run: OnlineRun) -> bool:
    """Whether the samples of a group differ in the chosen score."""
    filter_groups = run.config.algorithm.filter_groups
    if not filter_groups.enable:
        return bool(group.rollouts)
    values = [_metric(rollout, filter_groups.metric or "reward") for rollout in group.rollouts]
    return len(values) > 1 and pstdev(values) > 0


def _metric(rollout: Rollout, name: str) -> float:
    """A score by name: the total, or a component at any depth."""
    assert rollout.score is not None
    flat = rollout.score.flat()
    if name in ("reward", "score", rollout.score.name):
        found = rollout.score.value
    else:
        found = next((v for path, v in flat.items() if path.rpartition("/")[2] == name), None)
    if found is None:
        fix = "use `reward`, or one of: " + ", ".join(path.rpartition("/")[2] for path in flat)
        raise UserError("algorithm.filter_groups.metric", name, "the reward has no such part", fix)
    return found


def _greedy_rewards(
    run: OnlineRun, greedy: RolloutFuture
) -> tuple[dict[str, float], list[Rollout]]:
    """Reward of the greedy response to each prompt (ReMax baseline) by group, and failed ones.

    Scores that cannot be computed follow `reward.on_fault`, as for any other rollout.
    """
    with run.phase("generate"):
        groups = run.roles.generation.all_compared(greedy.result())
    with run.phase("score"):
        scored, broken = score_groups(run, groups, purpose="greedy")
    out = {rollout.key for rollout in run.reward.apply_fault_policy(scored)}
    answers = [group.rollouts[0] for group in scored]
    return {str(r.group): _value(r.score) for r in answers if r.key not in out}, broken


def _has_baseline(group: Group, baselines: Mapping[str, float]) -> bool:
    return any(str(rollout.group) in baselines for rollout in group.rollouts)


def _value(score: Score | None) -> float:
    assert score is not None
    assert score.value is not None
    return score.value
