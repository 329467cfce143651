"""Validation: rollouts on held-out prompts, with pass@k, mean@k and a confidence interval."""

from collections.abc import Mapping, Sequence
from math import comb, sqrt

from luyen.config.schema.run import RunConfig
from luyen.rewards.step import Scored
from luyen.rollout.protocol import Sampling
from luyen.telemetry.catalog import metric

metric("val/faults", doc="Conversations of the validation that broke and are judged by nobody.")
_Z = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""


def validation_sampling(config: RunConfig, stop_ids: frozenset[int]) -> Sampling:
    """How validation draws: greedily unless `val_kwargs.do_sample`."""
    val_kwargs = config.actor_rollout_ref.rollout.val_kwargs
    return Sampling(
        max_new_tokens=config.data.max_response_length,
        temperature=val_kwargs.temperature if val_kwargs.do_sample else 0.0,
        top_k=val_kwargs.top_k if val_kwargs.do_sample else -1,
        top_p=val_kwargs.top_p if val_kwargs.do_sample else 1.0,
        stop_ids=stop_ids,
    )


def scored_metrics(scored: Sequence[Scored]) -> dict[str, float]:
    """`validation_metrics` of the rollouts that have a score; a group without any is left out."""
    rewards: dict[str, list[list[float]]] = {}
    for group in scored:
        scores = [rollout.score for rollout in group.rollouts if rollout.score is not None]
        values = [score.value for score in scores if score.value is not None]
        if values:
            rewards.setdefault(group.prompt.data_source, []).append(values)
    return validation_metrics(rewards)


def pass_at_k(solved: int, samples: int, k: int) -> float:
    """Chance that k of the samples, drawn without replacement, hold a solution (arXiv:2107.03374).

    Example:
        >>> pass_at_k(1, 4, 2)
        0.5
    """
    return 1.0 - comb(samples - solved, k) / comb(samples, k)


def wilson_interval(mean: float, count: int) -> tuple[float, float]:
    """95 % interval of a share of `count` independent trials; sound near 0 and 1.

    Example:
        >>> low, high = wilson_interval(1.0, 10)
        >>> round(low, 2), round(high, 2)
        (0.72, 1.0)
    """
    if count == 0:
        return 0.0, 1.0
    square = _Z * _Z
    centre = (mean + square / (2 * count)) / (1 + square / count)
    half = (
        _Z * sqrt(mean * (1 - mean) / count + square / (4 * count * count)) / (1 + square / count)
    )
    return max(0.0, centre - half), min(1.0, centre + half)


def validation_metrics(
    scores: Mapping[str, Sequence[Sequence[float]]], *, solved_at: float = 1.0
) -> dict[str, float]:
    """Metrics per data source from the rewards of each prompt's samples, and over all of them.

    A sample counts as solved when its reward reaches `solved_at`. The interval treats prompts, not
    samples, as independent.
    """
    found: dict[str, float] = {}
    everything = [rewards for source in scores.values() for rewards in source]
    for name, prompts in {**scores, "all": everything}.items():
        prefix = "val" if name == "all" else f"val/{name}"
        found |= {f"{prefix}/{key}": value for key, value in _metrics(prompts, solved_at).items()}
    return found


def _metrics(prompts: Sequence[Sequence[float]], solved_at: float) -> dict[str, float]:
    samples = min(len(rewards) for rewards in prompts)
    means = [sum(rewards) / len(rewards) for rewards in prompts]
    solved = [sum(r >= solved_at for r in rewards) for rewards in prompts]
    accuracy = sum(n / len(r) for n, r in zip(solved, prompts, strict=True)) / len(prompts)
    low, high = wilson_interval(accuracy, len(prompts))
    found = {
        f"reward/mean@{samples}": sum(means) / len(means),
        "accuracy": accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
    }
    k = 1
    while k <= samples:
        chances = [pass_at_k(n, len(r), k) for n, r in zip(solved, prompts, strict=True)]
        found[f"pass@{k}"] = sum(chances) / len(chances)
        k *= 2
    return found
