"""Validation: rollouts on held-out prompts, with pass@k, mean@k and a confidence interval."""

from collections.abc import Mapping, Sequence

from luyen.config.schema.run import RunConfig
from luyen.rewards.step import Scored
from luyen.rollout.protocol import Sampling
from luyen.telemetry.catalog import metric
from luyen.train.shares import pass_at_k, powers_of_two, wilson_interval

metric("val/faults", doc="Conversations of the validation that broke and are judged by nobody.")


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
    for k in powers_of_two(samples):
        chances = [pass_at_k(n, len(r), k) for n, r in zip(solved, prompts, strict=True)]
        found[f"pass@{k}"] = sum(chances) / len(chances)
    return found
