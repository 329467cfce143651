"""What an answer causes is a score, and what a rule causes is a fault.

A rule that says what a wrong answer is worth (`wrong=` where it is registered) may run out of time,
memory or stack on an answer, or raise. If it judges an empty answer to the same row, the answer was
the cause, and it is a wrong one. If it cannot even do that, nothing can be said about the answer.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from luyen.base.records import Rollout
from luyen.rewards.calls import Call, Executor
from luyen.rewards.counts import Counts
from luyen.rewards.outcome import Outcome
from luyen.rewards.rules.all import rule_rewards


@final
class StandIns:
    """Makes calls; where an answer is what a rule failed on, its score is that of a wrong one."""

    def __init__(self, inner: Executor, counts: Counts) -> None:
        self._inner = inner
        self._counts = counts

    async def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """What came of each call, in order."""
        outcomes = await self._inner.run(calls)
        pairs = zip(calls, outcomes, strict=True)
        return await asyncio.gather(*(self._settled(call, outcome) for call, outcome in pairs))

    async def _settled(self, call: Call, outcome: Outcome) -> Outcome:
        facts = rule_rewards.facts(call.name) if call.rule else {}
        if outcome.error is None or outcome.is_unscorable or "wrong" not in facts:
            return outcome
        if outcome.is_dead:  # something else on the machine may have ended the process
            [outcome] = await self._inner.run([call])
            if outcome.error is None or outcome.is_unscorable:
                return outcome
        [empty] = await self._inner.run([without_answer(call)])
        if empty.is_unscorable:
            return replace(empty, seconds=outcome.seconds)
        if empty.numbers is None:
            error = f"{outcome.error}; for an empty answer: {empty.error or empty.refused}"
            return replace(outcome, error=error)
        self._counts.add(f"judging/unjudgeable/{call.name}")
        score = stand_in(facts, call.arguments)
        return Outcome(numbers={"score": score}, is_stand_in=True, seconds=outcome.seconds)


def stand_in(facts: Mapping[str, Any], arguments: Mapping[str, Any]) -> float:
    """What an answer is worth that the rule could not judge: `wrong`, and so much for each call.

    Example:
        >>> stand_in({"wrong": 0.0}, {})
        0.0
    """
    rollout = arguments.get("rollout")
    calls = len(rollout.calls) if isinstance(rollout, Rollout) else 0
    return float(facts["wrong"]) + calls * float(facts.get("wrong_per_call", 0.0))


def without_answer(call: Call) -> Call:
    """The same call about an answer that says nothing."""
    given = dict(call.arguments)
    if "answer" in given:
        given["answer"] = replace(given["answer"], text="", response_length=0)
    if "rollout" in given:
        given["rollout"] = replace(given["rollout"], text="", calls=(), messages=(), given=())
    return replace(call, arguments=given)
