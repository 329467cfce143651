"""How far behind the weights are that drew the rollouts of a step."""

from collections.abc import Sequence
from statistics import fmean

from luyen.base.records import Rollout


def staleness_metrics(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """Steps between the weights that drew and those that learn, counted from the oldest token."""
    drawn = [
        {v for branch in rollout.branches for v in set(branch.versions) if v is not None}
        for rollout in rollouts
    ]
    behind = [version - min(versions) for versions in drawn if versions]
    if not behind:
        return {}
    return {
        "async/staleness_mean": fmean(behind),
        "async/staleness_max": float(max(behind)),
        "async/mixed_fraction": fmean(len(versions) > 1 for versions in drawn),
    }
