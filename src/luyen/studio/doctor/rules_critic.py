"""Rules about the critic."""

from collections.abc import Iterator
from statistics import median

from luyen.studio.doctor.course import WINDOW
from luyen.studio.doctor.findings import Symptom, rule
from luyen.studio.doctor.read import RunRecord
from luyen.studio.doctor.tuning import calmer_critic

_EXPLODED = 10.0
"""Times the smallest loss it had: the critic has lost what it knew."""
_WORSE = -0.1
"""Explained variance of a critic that misleads; one that knows nothing wavers around 0."""
_PATIENCE = 20
"""Steps that a fresh value head may take to become better than a constant."""


@rule("value-loss-explosion", "warning", steps=2 * WINDOW)
def value_loss_explosion(record: RunRecord) -> Iterator[Symptom]:
    """The loss of the critic grows by an order of magnitude."""
    loss = record.course("critic/vf_loss")
    if not loss.has_both_ends:
        return
    values = loss.values[:-WINDOW]
    best = min(median(values[i : i + WINDOW]) for i in range(len(values) - WINDOW + 1))
    if loss.end() > _EXPLODED * best:
        yield Symptom(
            says=f"critic/vf_loss is {loss.end():.3g}, and was {best:.3g} at its best",
            experiment=calmer_critic(record),
            steps=loss.last_steps,
            numbers={"critic/vf_loss": loss.end(), "at its best": best},
        )


@rule("critic-worse-than-mean", "warning", steps=_PATIENCE)
def critic_worse_than_mean(record: RunRecord) -> Iterator[Symptom]:
    """The critic predicts returns worse than their mean would."""
    explained = record.course("critic/explained_variance")
    if len(explained) >= _PATIENCE and explained.end() < _WORSE:
        yield Symptom(
            says=f"critic/explained_variance is {explained.end():.3g} after {len(explained)} "
            "steps: advantages are noisier than without a critic",
            experiment=calmer_critic(record),
            steps=explained.last_steps,
            numbers={"critic/explained_variance": explained.end()},
        )
