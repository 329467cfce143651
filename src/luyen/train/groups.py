"""Take the groups of a step: draw, generate, judge, and draw again where nothing is learned."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from statistics import pstdev

import torch
from torch import Tensor

from luyen.base.errors import UserError
from luyen.base.records import Prompt, Rollout, Score
from luyen.rewards.step import Scored, score_all, settle
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import Group
from luyen.train.run import OnlineRun


def take_groups(run: OnlineRun, step: int) -> list[Group]:
    """The step's groups, judged; with `filter_groups`, only such whose samples differ."""
    data, algorithm = run.config.data, run.config.algorithm
    filter_groups = algorithm.filter_groups
    kept: list[Group] = []
    batches = idle = 0
    while len(kept) < data.train_batch_size:
        if batches and not filter_groups.enable:
            break
        if filter_groups.max_num_gen_batches and batches >= filter_groups.max_num_gen_batches:
            break
        fresh = [g for g in _one_batch(run, step, batches) if _teaches(g, run)]
        batches, idle = batches + 1, 0 if fresh else idle + 1
        kept += fresh
        if idle * data.train_batch_size >= len(run.data.train.prompts):
            break  # every row was tried since the last group that teaches
    run.notes["group/generated_batches"] = float(batches)
    run.notes["group/kept_fraction"] = len(kept) / (batches * data.train_batch_size)
    if not kept:
        raise UserError(
            "algorithm.filter_groups.max_num_gen_batches",
            filter_groups.max_num_gen_batches,
            f"{batches} batches were drawn and no group of them has samples that score differently",
            "choose easier or harder rows, raise rollout.n, or allow more batches",
        )
    return kept[: data.train_batch_size]


def _one_batch(run: OnlineRun, step: int, batch: int) -> list[Group]:
    count = run.config.data.train_batch_size
    rows = run.data.sampler.take(run.cursor, count)
    run.cursor += count
    prompts = [run.data.train.prompts[i] for i in rows]
    first = batch * count
    with run.phase("generate"):
        drawn = run.generate(prompts, step=step, first=first, sampling=run.sampling)
    with run.phase("score"):
        judged = judge(run, drawn)
    if run.needs.baselines:
        run.baselines |= _greedy_rewards(run, prompts, step, first)
    return judged


def judge(run: OnlineRun, groups: Sequence[Group]) -> list[Group]:
    """The groups with scores; rollouts that could not be scored are recorded and left out."""
    scored = scored_groups(run, groups)
    run.judged += scored
    out = {rollout.key for rollout in run.reward.settle(scored)}
    return [_sound(group, out) for group in scored]


def scored_groups(run: OnlineRun, groups: Sequence[Group]) -> list[Scored]:
    """Every group with the scores of its rollouts."""
    pairs = [(group.prompt, group.rollouts) for group in groups]
    return asyncio.run(score_all(run.reward, pairs))


def _sound(group: Scored, faulty: set[tuple[int, int, str, int]]) -> Group:
    kept = tuple(rollout for rollout in group.rollouts if rollout.key not in faulty)
    return Group(prompt=group.prompt, rollouts=kept)


def _teaches(group: Group, run: OnlineRun) -> bool:
    """Whether the samples of a group differ in the chosen score."""
    filter_groups = run.config.algorithm.filter_groups
    if not filter_groups.enable:
        return bool(group.rollouts)
    values = [_metric(rollout, filter_groups.metric or "reward") for rollout in group.rollouts]
    return len(values) > 1 and pstdev(values) > 0


def _metric(rollout: Rollout, name: str) -> float:
    """A score by name: the whole, or a part at any depth."""
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
    run: OnlineRun, prompts: Sequence[Prompt], step: int, first: int
) -> dict[str, float]:
    """Reward of the likeliest answer to each prompt (ReMax's baseline), by group."""
    greedy: Sampling = replace(run.sampling, temperature=0.0, top_k=-1, top_p=1.0)
    with run.phase("generate"):
        groups = run.generate(
            prompts, step=step, first=first, sampling=greedy, purpose="greedy", samples=1
        )
    with run.phase("score"):
        scored = scored_groups(run, groups)
    settle(scored, on_fault="fail")
    return {str(g.rollouts[0].group): _value(g.rollouts[0].score) for g in scored}


def _value(score: Score | None) -> float:
    assert score is not None
    assert score.value is not None
    return score.value


def baselines_of(run: OnlineRun, rollouts: Sequence[Rollout]) -> Tensor:
    """The greedy reward that belongs to each rollout."""
    found = [run.baselines[str(rollout.group)] for rollout in rollouts]
    return torch.tensor(found, device=run.roles.device)


def components_of(run: OnlineRun, rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """Named parts of the reward, one number per rollout."""
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        assert rollout.score is not None
        for part in rollout.score.parts:
            parts.setdefault(part.name, []).append(_value(part))
    device = run.roles.device
    return {name: torch.tensor(values, device=device) for name, values in parts.items()}
