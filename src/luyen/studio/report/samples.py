"""Rollouts worth reading: the best, the worst, the median and a random one of the first and last
steps."""

import hashlib

from luyen.studio.doctor.read import RunRecord
from luyen.studio.report.markup import Html, element, joined, missing
from luyen.studio.report.sample_view import legend, sample
from luyen.studio.report.token_text import TokenText
from luyen.telemetry.rollout_files import RecordedRollout


def samples_section(record: RunRecord) -> Html:
    """Samples of the first and the last step whose rollouts are there."""
    steps = list(record.rollouts)
    if not steps:
        return missing("There are no rollouts: the run was supervised, or they were removed.")
    text = TokenText(record.config.actor_rollout_ref.model)
    seed = str(record.manifest.get("run_id"))
    parts: list[Html] = [legend()]
    if not text.is_known:
        parts.append(missing("The tokenizer is not on this machine: tokens are shown as numbers."))
    for step in dict.fromkeys((steps[0], steps[-1])):
        rollouts = record.rollouts[step]
        parts.append(element("h3", f"Step {step}, out of {len(rollouts)} rollouts that were read"))
        parts += [sample(name, one, text) for name, one in chosen(rollouts, seed)]
    return joined(*parts)


def chosen(rollouts: list[RecordedRollout], seed: str) -> list[tuple[str, RecordedRollout]]:
    """Names and rollouts; one that is chosen twice is shown once, under both names."""
    judged = sorted(
        (r for r in rollouts if _reward(r) is not None), key=lambda r: _reward(r) or 0.0
    )
    picked: list[tuple[str, RecordedRollout]] = []
    if judged:
        picked = [("best", judged[-1]), ("worst", judged[0]), ("median", judged[len(judged) // 2])]
    # By a hash, so that the page of a run is the same each time it is made.
    place = int(hashlib.sha256(seed.encode()).hexdigest(), 16) % len(rollouts)
    picked.append(("random", rollouts[place]))
    broken = next((r for r in rollouts if r.rollout.fault is not None), None)
    picked += [] if broken is None else [("broken", broken)]
    names: dict[tuple[int, int, str, int], list[str]] = {}
    for name, one in picked:
        names.setdefault(one.rollout.key, []).append(name)
    shown = {one.rollout.key: one for _, one in picked}
    return [(" and ".join(found), shown[key]) for key, found in names.items()]


def _reward(recorded: RecordedRollout) -> float | None:
    score = recorded.rollout.score
    return None if score is None else score.value
