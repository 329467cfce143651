"""Validation during training: held-out rollouts, pass@k, mean@k, confidence intervals."""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean

from luyen.base.records import Prompt, reaches
from luyen.rewards.scoring import ScoredGroup
from luyen.telemetry.metrics import metric
from luyen.telemetry.rollout_tables import VAL_TABLE, rollout_table
from luyen.train.builders.roles import validation_sampling
from luyen.train.pass_at_k import pass_at_k, powers_of_two, wilson_interval
from luyen.train.run import OnlineRun
from luyen.train.scoring import score_groups

UNNAMED = "unnamed"
"""Source name of rows without `data_source`."""

metric("val/faults", doc="Conversations of the validation that failed and are not scored.")
metric(
    "val/reward/<component...>/mean",
    doc="Mean of one component over the validation's samples, whatever its weight.",
)


def scored_metrics(scored: Sequence[ScoredGroup]) -> dict[str, float]:
    """`validation_metrics` of the rollouts that have a score; a group without any is left out.

    Components have means of their own, whatever their weight: one of weight 0 is a pure metric.
    """
    rewards: dict[str, list[list[float]]] = {}
    for group in scored:
        scores = [rollout.score for rollout in group.rollouts if rollout.score is not None]
        values = [score.value for score in scores if score.value is not None]
        if values:
            rewards.setdefault(group.prompt.data_source or UNNAMED, []).append(values)
    return {**validation_metrics(rewards), **_component_means(scored)}


def _component_means(scored: Sequence[ScoredGroup]) -> dict[str, float]:
    """Mean of every node below the root, where it has a value."""
    values: dict[str, list[float]] = {}
    for score in (score for group in scored for score in group.scores):
        for path, value in score.flat().items():
            if value is not None and path != score.name:
                values.setdefault(f"val/{path}/mean", []).append(value)
    return {name: fmean(some) for name, some in values.items()}


def validation_metrics(
    scores: Mapping[str, Sequence[Sequence[float]]], *, solved_at: float = 1.0
) -> dict[str, float]:
    """Metrics per data source from the rewards of each prompt's samples, and over all of them.

    A sample counts as solved when its reward reaches `solved_at`. The interval treats prompts, not
    samples, as independent.
    """
    found: dict[str, float] = {}
    everything = [rewards for source in scores.values() for rewards in source]
    # Without any named source there is one, and `val/...` covers it.
    named = {} if list(scores) == [UNNAMED] else scores
    parts = {**{f"val/{name}": rows for name, rows in named.items()}, "val": everything}
    for prefix, prompts in parts.items():
        found |= {f"{prefix}/{key}": value for key, value in _metrics(prompts, solved_at).items()}
    return found


def _metrics(prompts: Sequence[Sequence[float]], solved_at: float) -> dict[str, float]:
    samples = min(len(rewards) for rewards in prompts)
    means = [sum(rewards) / len(rewards) for rewards in prompts]
    solved = [sum(reaches(r, solved_at) for r in rewards) for rewards in prompts]
    accuracy = sum(n / len(r) for n, r in zip(solved, prompts, strict=True)) / len(prompts)
    low, high = wilson_interval(accuracy, len(prompts))
    found = {
        f"reward/mean@{samples}": sum(means) / len(means),
        "accuracy": accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
    }
    for k in powers_of_two(samples):
        chances = [pass_at_k(n, len(r), k) for n, r in zip(solved, prompts, strict=True)]
        found[f"pass@{k}"] = sum(chances) / len(chances)
    return found


def validate(run: OnlineRun) -> dict[str, float]:
    """Generate and score the validation prompts; metrics of the finished step, if there are any."""
    if run.data.validation is None:
        return {}
    prompts: Sequence[Prompt] = run.data.validation.prompts
    val_kwargs = run.config.actor_rollout_ref.rollout.val_kwargs
    run.open_validation_journal()
    with run.phase("validate"):
        # Step 0 in the address: every validation uses the same random numbers.
        groups = run.generate(
            prompts,
            step=0,
            first=0,
            sampling=validation_sampling(run.config, run.data.renderer.tokenizer),
            purpose="validation",
            samples=val_kwargs.n,
        )
        scored, broken = score_groups(run, groups, purpose="validation")
        run.reward.apply_fault_policy(scored)
    metrics = scored_metrics(scored)
    if run.roles.generation.conversations is not None:
        metrics["val/faults"] = float(len(broken))
    rollouts = [rollout for group in scored for rollout in group.rollouts]
    run.recorder.validation(run.step, [*rollouts, *broken], metrics)
    if run.recorder.log.shows_rollouts:
        most = run.config.trainer.log_val_generations
        decode = partial(run.data.renderer.tokenizer.decode, skip_special=False)
        table = rollout_table(VAL_TABLE, run.step, [*rollouts, *broken], most=most, decode=decode)
        run.recorder.log.rollouts(table)
    return metrics
