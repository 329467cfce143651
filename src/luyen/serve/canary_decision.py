"""The decision between two models by the scores of their answers: pure records.

Traffic is split by a stable hash. As soon as both models have scores since the last pair, their
means are the next pair; the difference goes into two sequential tests
(`luyen.algorithms.sequential_test`). The first of them that is significant decides, at any time.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, final

from luyen.algorithms.sequential_test import MeanTest

Arm: TypeAlias = Literal["stable", "candidate"]
Outcome: TypeAlias = Literal["promoted", "rolled_back"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryLimits:
    """When a candidate is promoted, and when it is rolled back.

    Example:
        >>> CanaryLimits(share=0.1).error_rate
        0.05
    """

    share: float
    """Share of the traffic that the candidate answers until a decision, above 0 and below 1."""
    error_rate: float = 0.05
    """Largest probability of promoting a candidate that is not better, and of rolling one back
    that is not worse."""
    min_gain: float = 0.0
    """The candidate is promoted when its mean score is higher by more than this."""
    max_loss: float = 0.0
    """It is rolled back when its mean score is lower by more than this."""
    max_pairs: int = 10_000
    """It is rolled back after so many pairs without a decision."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ArmScores:
    """Scores of one model.

    Example:
        >>> ArmScores().add(1.0).add(0.0).mean
        0.5
    """

    count: int = 0
    """Scores so far."""
    total: float = 0.0
    """Their sum."""

    def add(self, score: float) -> "ArmScores":
        """One more."""
        return ArmScores(count=self.count + 1, total=self.total + score)

    @property
    def mean(self) -> float:
        """NaN without scores."""
        return self.total / self.count if self.count else math.nan


def _no_scores() -> Mapping[Arm, ArmScores]:
    return {"stable": ArmScores(), "candidate": ArmScores()}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What became of a candidate.

    Example:
        >>> Decision(outcome="promoted", why="its scores are higher").outcome
        'promoted'
    """

    outcome: Outcome
    """Whether it answers everything or nothing from now on."""
    why: str
    """The reason, in words."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryState:
    """What is known of the two models.

    Example:
        >>> state = CanaryState.begin(CanaryLimits(share=0.5))
        >>> for _ in range(40):
        ...     state = state.observe("stable", 0.2).observe("candidate", 0.9)
        >>> state.decision.outcome
        'promoted'
    """

    limits: CanaryLimits
    """When it ends."""
    better: MeanTest
    """Evidence that the candidate is better by more than `min_gain`."""
    worse: MeanTest
    """Evidence that it is worse by more than `max_loss`."""
    scores: Mapping[Arm, ArmScores] = field(default_factory=_no_scores)
    """All scores of each model."""
    recent: Mapping[Arm, ArmScores] = field(default_factory=_no_scores)
    """Scores of each model since the last pair."""
    decision: Decision | None = None
    """None: the traffic is still split."""

    @classmethod
    def begin(cls, limits: CanaryLimits) -> "CanaryState":
        """Nothing is known."""
        better, worse = MeanTest(bound=limits.min_gain), MeanTest(bound=limits.max_loss)
        return cls(limits=limits, better=better, worse=worse)

    @property
    def share(self) -> float:
        """Share of the traffic that the candidate answers now."""
        if self.decision is None:
            return self.limits.share
        return 1.0 if self.decision.outcome == "promoted" else 0.0

    @property
    def pairs(self) -> int:
        """Pairs that were compared."""
        return self.better.count

    def observe(self, arm: Arm, score: float) -> "CanaryState":
        """After one more score from 0 to 1; a decision that was made stays."""
        if not 0.0 <= score <= 1.0:
            raise ValueError(f"a score must be from 0 to 1, got {score}")
        if self.decision is not None:
            return self
        scores = {**self.scores, arm: self.scores[arm].add(score)}
        recent = {**self.recent, arm: self.recent[arm].add(score)}
        return replace(self, scores=scores, recent=recent)._pair()

    def decide(self, outcome: Outcome, why: str) -> "CanaryState":
        """After a decision that scores did not make; the first decision stays."""
        if self.decision is not None:
            return self
        return replace(self, decision=Decision(outcome=outcome, why=why))

    def _pair(self) -> "CanaryState":
        if not all(scores.count for scores in self.recent.values()):
            return self
        difference = self.recent["candidate"].mean - self.recent["stable"].mean
        state = replace(
            self,
            better=self.better.observe(difference),
            worse=self.worse.observe(-difference),
            recent=_no_scores(),
        )
        return state._judge()

    def _judge(self) -> "CanaryState":
        limits = self.limits
        means = " against ".join(f"{self.scores[a].mean:.3f}" for a in ("candidate", "stable"))
        facts = f"mean score {means} after {self.pairs} pairs, error rate {limits.error_rate:g}"
        if self.better.is_significant(limits.error_rate):
            return self.decide(
                "promoted", f"it is better by more than {limits.min_gain:g}: {facts}"
            )
        if self.worse.is_significant(limits.error_rate):
            return self.decide(
                "rolled_back", f"it is worse by more than {limits.max_loss:g}: {facts}"
            )
        if self.pairs >= limits.max_pairs:
            return self.decide("rolled_back", f"no difference was found: {facts}")
        return self


def arm_of(key: str, share: float) -> Arm:
    """The model that answers a caller: the same one for the same key, while the share stays.

    A larger share keeps the callers that the candidate already has.

    Example:
        >>> arm_of("ann", 0.0), arm_of("ann", 1.0)
        ('stable', 'candidate')
    """
    digest = hashlib.blake2b(key.encode(errors="replace"), digest_size=8).digest()
    return "candidate" if int.from_bytes(digest, "big") < share * 2**64 else "stable"


def caller_key(body: Mapping[str, Any]) -> str:
    """Name of a caller: the user of the request, or else how its conversation begins.

    Example:
        >>> caller_key({"user": "ann", "prompt": "1+1="}), caller_key({"prompt": "1+1="})
        ('user ann', 'begin "1+1="')
    """
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        if isinstance(body.get(name), str) and body[name]:
            return f"user {body[name]}"
    messages = body.get("messages")
    if isinstance(messages, list) and messages:
        turns = [m for m in messages if isinstance(m, dict) and m.get("role") == "user"]
        begin = (turns or messages)[0]
    else:
        begin = body.get("prompt")
    return f"begin {json.dumps(begin, sort_keys=True, ensure_ascii=False)}"
