"""What a step did, as one hash per stage. What depends on the clock is left out of every stage."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from luyen.base.calls import ToolCall
from luyen.base.digests import hash_parts, hash_value
from luyen.base.records import Rollout, Score
from luyen.engine.batch import PackedBatch
from luyen.models.digest import describe
from luyen.runtime.roles import Described
from luyen.telemetry.metrics_file import CLOCK
from luyen.telemetry.streams import Pack, stream_bytes

_CREDIT = ("advantages", "returns", "is_weights")
_RATE = "/lr"


def drawn_stages(
    *,
    rollouts: Sequence[Rollout],
    baselines: Mapping[str, float],
    batch: PackedBatch,
    pack: Pack = stream_bytes,
) -> dict[str, str]:
    """The stages of a step that come before it is learned from.

    `rollouts` are all that were drawn, those that were left out included.
    """
    ordered = sorted(rollouts, key=lambda r: r.key)
    credit = {name: batch.streams[name] for name in _CREDIT if name in batch.streams}
    return {
        "prompts": hash_value(sorted({(r.group.draw, r.group.uid) for r in ordered})),
        "rollouts": hash_parts(_drawn(ordered, pack)),
        "rewards": hash_value([[_judged(r) for r in ordered], dict(baselines)]),
        "advantages": hash_value(describe(credit)),
    }


def learned_stages(update: Mapping[str, float], held: Described) -> dict[str, str]:
    """The stages of what was learned.

    `update` is what the optimizer steps measured, and `held` what they left. The learning rate is
    no property of a gradient, and is left out.
    """
    weights = hash_value(dict(held.weights()))
    gradients = hash_value([measured_update(update), dict(held.moments())])
    return {"gradients": gradients, "weights": weights}


def measured_update(update: Mapping[str, float]) -> dict[str, float]:
    """What an optimizer step measured, without its learning rate."""
    return {name: value for name, value in update.items() if not name.endswith(_RATE)}


def metrics_stage(metrics: Mapping[str, float]) -> str:
    """The hash of what a step measured."""
    return hash_value({n: float(v) for n, v in metrics.items() if not n.startswith(CLOCK)})


def _drawn(rollouts: Sequence[Rollout], pack: Pack) -> Iterator[bytes]:
    """Every token of the rollouts with its origin, and what tools answered on the way.

    Where one part ends and the next begins counts, so branches need no marks between them.
    """
    yield hash_value([_ended(rollout) for rollout in rollouts]).encode()
    # A rollout has the streams of its last branch; `branches` would copy them.
    for rollout in rollouts:
        for branch in (*rollout.earlier, rollout):
            yield pack(branch)


def _ended(rollout: Rollout) -> list[Any]:
    """What a rollout is besides its tokens; the wording of a fault may vary, and is left out."""
    calls = [_called(call) for call in rollout.calls]
    faulty = rollout.fault is not None
    return [*rollout.key, len(rollout.earlier), rollout.stop, faulty, rollout.text, calls]


def _called(call: ToolCall) -> list[Any]:
    """A call and what the policy read about it; how long it took and how often it was tried vary.

    So does the wording of an error, which may name an address or a time.
    """
    return [call.turn, call.name, dict(call.arguments), call.status, call.result, call.reward]


def _judged(rollout: Rollout) -> list[Any]:
    score = rollout.score
    return [*rollout.key, None if score is None else _tree(score), rollout.given]


def _tree(score: Score) -> list[Any]:
    """A score with its parts; why one is missing is told in words, which may vary."""
    parts = [_tree(part) for part in score.parts]
    failed = score.error is not None
    told = [score.name, score.value, score.weight, parts, failed, score.by_turn]
    made = [score.raw, score.gated, score.combine]
    if score.turned:
        return [*told, *made, "turned"]
    return told if made == [None, False, "sum"] else told + made
