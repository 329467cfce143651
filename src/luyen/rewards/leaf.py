"""What scores a leaf of the reward tree: a rule with its settings, an LLM judge, a reward model."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, final

from luyen.base.errors import UserError, did_you_mean
from luyen.base.records import Prompt, Rollout, Score
from luyen.config.schema.reward import ComponentConfig
from luyen.rewards.calls import Executor, ScoreCall, ScoreOutcome, add_time
from luyen.rewards.llm_judge.judge_reward import JudgeFactory
from luyen.rewards.protocol import Reward
from luyen.rewards.rules.all import rule_rewards
from luyen.rewards.rules.rule import answer_of
from luyen.sandbox.launch import demand

# One rule with its settings, as a reward.

FIELD = "reward.components"


def rule_kwargs(rule: Callable[..., float | Score]) -> dict[str, Any]:
    """Keyword-only parameters of a rule and their defaults."""
    parameters = inspect.signature(rule).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@final
class RuleReward:
    """Scores every rollout by one registered rule."""

    def __init__(self, rule: str, hparams: Mapping[str, Any], *, executor: Executor) -> None:
        function = rule_rewards.get(rule)
        _check_package(rule)
        _check_kwargs(rule, function, hparams)
        self._rule = rule
        self._sees_rollout = _sees_rollout(rule)
        self._hparams = dict(hparams)
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

    def _call(self, prompt: Prompt, rollout: Rollout) -> ScoreCall:
        seen = {"rollout": rollout} if self._sees_rollout else {"answer": answer_of(rollout)}
        arguments = {"prompt": prompt, **seen, **self._hparams}
        return ScoreCall(name=self._rule, source=self._source, rule=True, arguments=arguments)

    def _score(self, outcome: ScoreOutcome) -> Score:
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


def _check_kwargs(
    rule: str, function: Callable[..., float | Score], hparams: Mapping[str, Any]
) -> None:
    known = rule_kwargs(function)
    for name in hparams:
        if name not in known:
            why = f"the rule `{rule}` has no hyperparameter of this name"
            raise UserError(f"{FIELD}.kwargs", name, why, did_you_mean(name, known))
    for name, default in known.items():
        if default is inspect.Parameter.empty and name not in hparams:
            why = f"the rule `{rule}` needs the hyperparameter `{name}`"
            raise UserError(f"{FIELD}.kwargs", dict(hparams), why, f"set kwargs.{name}")


@final
class LeafFactory:
    """Makes the sources of a tree's nodes."""

    def __init__(
        self,
        *,
        executor: Executor,
        isolated: Executor,
        judges: JudgeFactory,
        model: Reward | None,
        max_response_length: int,
        require: Sequence[str],
    ) -> None:
        """`executor` makes ordinary calls, `isolated` those of rules that could hang.

        `require` are promises of the sandbox without which no program is run.
        """
        self._executor = executor
        self._isolated = isolated
        self._judges = judges
        self._model = model
        self._max_response_length = max_response_length
        self._require = require

    def __call__(self, path: str, component: ComponentConfig) -> Reward:
        """The source of the node at a path."""
        if component.judge is not None:
            return self._judges.judge(component.judge)
        if component.model is not None:
            return self._learned(path)
        assert component.rule is not None, f"`{path}` has no source"
        return self._rule(component.rule, component)

    def _learned(self, path: str) -> Reward:
        if self._model is None:
            why = f"the component `{path}` asks for the learned reward, and there is none here"
            fix = "set reward.reward_model.enable=true and reward.reward_model.model_path"
            raise UserError("reward.components", path, why, fix)
        return self._model

    def _rule(self, rule: str, component: ComponentConfig) -> Reward:
        hparams = dict(component.kwargs)
        if "max_response_length" in rule_kwargs(rule_rewards.get(rule)):
            hparams.setdefault("max_response_length", self._max_response_length)
        if "refuse_forgeable" in rule_kwargs(rule_rewards.get(rule)):
            demand(self._require)
            hparams.setdefault("refuse_forgeable", "verdicts" in self._require)
        is_isolated = rule_rewards.facts(rule).get("isolated", False)
        return RuleReward(rule, hparams, executor=self._isolated if is_isolated else self._executor)
