"""Score the rollouts of a step: fault policy, dynamic sampling, greedy baselines (ReMax)."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import pstdev

from luyen.base.errors import UserError
from luyen.base.records import Rollout, Score
from luyen.rewards.scoring import ScoredGroup, ScoreJournal
from luyen.rollout.single_turn import Group
from luyen.runtime.futures import RolloutFuture
from luyen.telemetry.progress import PROGRESS
from luyen.train.rollouts import RolloutHandle
from luyen.train.run import OnlineRun


def generate_and_score(run: OnlineRun, step: int) -> list[Group]:
    """Generate and score the groups of a step; `filter_groups` drops groups of equal scores.

    Batches are generated until the step is full, or every row was tried without a further group. A
    UserError when no group is left, or when `max_num_gen_batches` batches do not fill the step.
    """
    wanted, filter_groups = run.config.data.train_batch_size, run.config.algorithm.filter_groups
    most = filter_groups.max_num_gen_batches if filter_groups.enable else 1
    kept: list[Group] = []
    batches = idle = 0
    handle: RolloutHandle | None = None
    with run.phase("generate"):
        run.submit_ahead(step)
    while len(kept) < wanted and not (batches and batches == most):
        with run.phase("generate"):
            handle = run.scheduler.take(step, before=handle)
        fresh = [group for group in _score_batch(run, handle) if _has_signal(group, run)]
        batches, idle = batches + 1, 0 if fresh else idle + 1
        kept += fresh
        if idle * wanted >= len(run.data.train.prompts):
            break  # every row was tried since the last group with a signal
    run.scheduler.release()
    run.notes["group/generated_batches"] = float(batches)
    run.notes["group/kept_fraction"] = len(kept) / (batches * wanted)
    is_short = filter_groups.enable and batches == most and len(kept) < wanted
    if is_short or not kept:
        few = (
            f"{len(kept)} of the {wanted} groups of a step have" if kept else "no group of them has"
        )
        raise UserError(
            "algorithm.filter_groups.max_num_gen_batches",
            filter_groups.max_num_gen_batches,
            f"{batches} batches were generated and {few} samples that score differently",
            "choose easier or harder rows, raise rollout.n, or allow more batches (0: no limit)",
        )
    return kept[:wanted]


def _score_batch(run: OnlineRun, handle: RolloutHandle) -> list[Group]:
    """Wait for a batch and score it, greedy baselines included."""
    run.use_journal(handle.journal)
    with run.phase("generate"), PROGRESS.watching("rollout", handle.slot.step):
        sampled = handle.sampled.result()
    with run.phase("score"):
        scored = score_and_filter(run, sampled)
    if handle.greedy is not None:
        run.baselines |= _greedy_rewards(run, handle.greedy)
        scored = [group for group in scored if _has_baseline(group, run)]
    return scored


def score_and_filter(run: OnlineRun, groups: Sequence[Group]) -> list[Group]:
    """The groups with scores, without rollouts that failed or could not be scored.

    Dropped rollouts are still recorded with the step (`run.scored`, `run.broken`).
    """
    scored = score_groups(run, groups) if run.needs.reward else _unscored(run, groups)
    run.scored += scored
    faulty = {rollout.key for rollout in run.reward.apply_fault_policy(scored)}
    return [_without(Group(prompt=g.prompt, rollouts=g.rollouts), faulty) for g in scored]


def score_groups(
    run: OnlineRun, groups: Sequence[Group], *, purpose: str = "rollout"
) -> list[ScoredGroup]:
    """Score every group; failed rollouts are removed first, and not scored."""
    pairs = [(group.prompt, group.rollouts) for group in _valid_groups(run, groups, purpose)]
    PROGRESS.expect("score", 0, len(pairs), restart=True)
    with PROGRESS.watching("score", 0):
        return run.reward.score(pairs, ScoreJournal(journal=run.journal, purpose=purpose))


def _unscored(run: OnlineRun, groups: Sequence[Group]) -> list[ScoredGroup]:
    """Groups without scores, for pure distillation."""
    return [
        ScoredGroup(prompt=g.prompt, rollouts=g.rollouts, seconds=(None,) * len(g.rollouts))
        for g in _valid_groups(run, groups, "rollout")
    ]


def _valid_groups(run: OnlineRun, groups: Sequence[Group], purpose: str) -> list[Group]:
    """The groups without failed rollouts, which go to `run.broken`; empty groups are dropped.

    A failed greedy baseline has the address of sample 0, so it is recorded as sample `n`.
    """
    generation = run.roles.generation
    keys = {rollout.key for rollout in generation.broken(groups, purpose=purpose)}
    bad = [generation.compared(r, g.prompt) for g in groups for r in g.rollouts if r.key in keys]
    if purpose == "greedy":
        number = run.config.actor_rollout_ref.rollout.n
        bad = [replace(rollout, sample=number) for rollout in bad]
    run.broken += bad
    valid = [_without(group, keys) for group in groups]
    return [group for group in valid if group.rollouts]


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


def _greedy_rewards(run: OnlineRun, greedy: RolloutFuture) -> dict[str, float]:
    """Reward of the greedy response to each prompt (ReMax baseline), by group.

    Scores that cannot be computed follow `reward.on_fault`, as for any other rollout.
    """
    with run.phase("generate"):
        groups = run.roles.generation.all_compared(greedy.result())
    with run.phase("score"):
        scored = score_groups(run, groups, purpose="greedy")
    out = {rollout.key for rollout in run.reward.apply_fault_policy(scored)}
    answers = [group.rollouts[0] for group in scored]
    return {str(r.group): _value(r.score) for r in answers if r.key not in out}


def _has_baseline(group: Group, run: OnlineRun) -> bool:
    return any(str(rollout.group) in run.baselines for rollout in group.rollouts)


def _value(score: Score | None) -> float:
    assert score is not None
    assert score.value is not None
    return score.value
