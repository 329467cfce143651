"""What becomes of conversations that broke."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from luyen.base.errors import UserError
from luyen.base.records import Rollout
from luyen.rollout.single_turn import Group

OnFault: TypeAlias = Literal["fail", "retry", "keep_min"]
"""A conversation that broke: stop the run, play it again, or go on without it."""
_FIELD = "actor_rollout_ref.rollout.multi_turn.on_fault"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPolicy:
    """What becomes of conversations that broke.

    Example:
        >>> FaultPolicy(on_fault="retry").attempts
        2
    """

    on_fault: OnFault = "retry"
    """Stop the run, play such a conversation again, or go on without it."""
    retries: int = 1
    """With `retry`: how often one is played again before the run goes on without it."""
    min_samples: int = 1
    """Sound rollouts that a group must keep to learn from it; with fewer, it is left out whole."""

    @property
    def attempts(self) -> int:
        """How often a conversation is played at most."""
        return 1 + (self.retries if self.on_fault == "retry" else 0)


def faulty_rollouts(
    groups: Iterable[Group], policy: FaultPolicy, *, may_be_all: bool = False
) -> list[Rollout]:
    """The rollouts to leave out of training: broken ones, and groups with too few sound ones.

    A UserError when the policy is to stop at a fault, or when nothing would be left, unless these
    are only some of the groups and that `may_be_all`.
    """
    every = list(groups)
    broken = [r for group in every for r in group.rollouts if r.fault is not None]
    if not broken:
        return []
    out: list[Rollout] = []
    for group in every:
        bad = [r for r in group.rollouts if r.fault is not None]
        is_thin = bool(bad) and len(group.rollouts) - len(bad) < policy.min_samples
        out += group.rollouts if is_thin else bad
    total = sum(len(group.rollouts) for group in every)
    if policy.on_fault == "fail" or (len(out) == total and not may_be_all):
        first = broken[0]
        why = f"{len(broken)} of {total} conversations broke; the first ({first.group}, sample "
        why += f"{first.sample}): {first.fault}"
        fix = "mend the tool or environment, or set it to retry or keep_min"
        raise UserError(_FIELD, policy.on_fault, why, fix)
    return out
