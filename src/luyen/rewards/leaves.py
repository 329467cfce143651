"""What judges a node without parts: a rule, a language model, or the learned reward."""

from collections.abc import Sequence
from typing import final

from luyen.base.errors import UserError
from luyen.config.schema.reward import Component
from luyen.rewards.calls import Executor
from luyen.rewards.components import RuleReward, knobs_of
from luyen.rewards.judge import Judges
from luyen.rewards.protocol import Reward
from luyen.rewards.rules.all import rule_rewards
from luyen.sandbox.limits import demand


@final
class Leaves:
    """Makes the sources of a tree's nodes."""

    def __init__(
        self,
        *,
        executor: Executor,
        isolated: Executor,
        judges: Judges,
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

    def __call__(self, path: str, component: Component) -> Reward:
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

    def _rule(self, rule: str, component: Component) -> Reward:
        knobs = dict(component.kwargs)
        if "max_response_length" in knobs_of(rule_rewards.get(rule)):
            knobs.setdefault("max_response_length", self._max_response_length)
        if "refuse_forgeable" in knobs_of(rule_rewards.get(rule)):
            demand(self._require)
            knobs.setdefault("refuse_forgeable", "verdicts" in self._require)
        is_isolated = rule_rewards.facts(rule).get("isolated", False)
        return RuleReward(rule, knobs, executor=self._isolated if is_isolated else self._executor)
