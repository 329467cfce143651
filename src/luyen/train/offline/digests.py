"""What an offline step did, as one hash per stage, under the names that online steps have."""

from collections.abc import Mapping, Sequence
from typing import Any

from luyen.base.digests import hash_value
from luyen.engine.lesson import Lesson
from luyen.models.digest import describe
from luyen.runtime.roles import learned
from luyen.train.digests import measured_update

_SMALL = (bool, int, float, str, type(None), list)


def stages_of(
    uids: Sequence[str], lesson: Lesson, update: Mapping[str, float], state: Mapping[str, Any]
) -> dict[str, str]:
    """Every stage of an offline step but its metrics.

    `prompts` are the rows that were drawn, `rollouts` what they are as tokens; there is nothing to
    sample, to reward or to give credit for.
    """
    roles = {name: part for name, part in state.items() if not is_small(part)}
    moments, weights = learned(roles)
    small = {name: part for name, part in state.items() if is_small(part)}
    held = describe({**moments, **weights})
    return {
        "prompts": hash_value(list(uids)),
        "rollouts": hash_value(describe(lesson.tensors())),
        "gradients": hash_value([measured_update(update), {name: held[name] for name in moments}]),
        "weights": hash_value([{name: held[name] for name in weights}, small]),
    }


def is_small(part: Any) -> bool:
    """Whether a part of a stage's state is a few plain numbers, and no tensors."""
    return isinstance(part, dict) and all(isinstance(x, _SMALL) for x in part.values())
