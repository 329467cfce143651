"""One rule with its knobs, as a reward."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.records import Prompt, Rollout, Score
from luyen.base.suggest import did_you_mean
from luyen.rewards.calls import Call, Executor
from luyen.rewards.clock import add_time
from luyen.rewards.outcome import Outcome
from luyen.rewards.rules.all import rule_rewards
from luyen.rewards.rules.rule import answer_of

FIELD = "reward.components"


def knobs_of(rule: Callable[..., float | Score]) -> dict[str, Any]:
    """Keyword-only parameters of a rule and their defaults."""
    parameters = inspect.signature(rule).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@final
class RuleReward:
    """Judges every rollout by one registered rule."""

    def __init__(self, rule: str, knobs: Mapping[str, Any], *, executor: Executor) -> None:
        function = rule_rewards.get(rule)
        _check_package(rule)
        _check_knobs(rule, function, knobs)
        self._rule = rule
        self._sees_rollout = _sees_rollout(rule)
        self._knobs = dict(knobs)
        self._executor = executor
        outside = not function.__module__.startswith("luyen.")
        self._source = inspect.getsourcefile(function) if outside else None

    @property
    def names(self) -> tuple[str, ...]:
        """The rule's name."""
        return (self._rule,)

    async def __call__(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score per rollout."""
        outcomes = await self._executor.run([self._call(prompt, r) for r in rollouts])
        for rollout, outcome in zip(rollouts, outcomes, strict=True):
            add_time(rollout, outcome.seconds)
        return [self._score(outcome) for outcome in outcomes]

    def _call(self, prompt: Prompt, rollout: Rollout) -> Call:
        seen = {"rollout": rollout} if self._sees_rollout else {"answer": answer_of(rollout)}
        arguments = {"prompt": prompt, **seen, **self._knobs}
        return Call(name=self._rule, source=self._source, rule=True, arguments=arguments)

    def _score(self, outcome: Outcome) -> Score:
        seconds = outcome.seconds
        if outcome.tree is not None:
            return replace(outcome.tree, name=self._rule, weight=1.0, seconds=seconds)
        if outcome.numbers is not None and set(outcome.numbers) == {"score"}:
            return Score(name=self._rule, value=outcome.numbers["score"], seconds=seconds)
        if outcome.error is not None:
            return Score(name=self._rule, value=None, error=outcome.error, seconds=seconds)
        returned = outcome.refused or repr(dict(outcome.numbers or {}))
        why = f"the rule returned {returned}, which is not a finite number"
        raise UserError(FIELD, self._rule, why, "return a float from the rule, or a Score")


def _sees_rollout(rule: str) -> bool:
    """Whether a rule declared that it reads the whole conversation."""
    sees = rule_rewards.facts(rule).get("sees", "answer")
    if sees not in ("answer", "rollout"):
        why = f"the rule was registered with sees={sees!r}"
        raise UserError(FIELD, rule, why, 'register it with sees="answer" or sees="rollout"')
    return sees == "rollout"


def _check_package(rule: str) -> None:
    facts = rule_rewards.facts(rule)
    package = facts.get("package")
    if package is not None and find_spec(package) is None:
        why = f"the rule needs the package {package}, which is not installed"
        raise UserError(FIELD, rule, why, f"pip install 'luyen[{facts['extra']}]'")


def _check_knobs(
    rule: str, function: Callable[..., float | Score], knobs: Mapping[str, Any]
) -> None:
    known = knobs_of(function)
    for name in knobs:
        if name not in known:
            why = f"the rule `{rule}` has no knob of this name"
            raise UserError(f"{FIELD}.kwargs", name, why, did_you_mean(name, known))
    for name, default in known.items():
        if default is inspect.Parameter.empty and name not in knobs:
            why = f"the rule `{rule}` needs the knob `{name}`"
            raise UserError(f"{FIELD}.kwargs", dict(knobs), why, f"set kwargs.{name}")
