"""The user's own function: `compute_score(data_source, solution_str, ground_truth, extra_info)`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from luyen.base.calls import ToolCall
from luyen.base.errors import UserError
from luyen.base.records import Prompt, Rollout, Score
from luyen.rewards.calls import FILE_FIELD, Call, Executor
from luyen.rewards.clock import add_time
from luyen.rewards.compose import ROOT, total
from luyen.rewards.loading import load_function, takes
from luyen.rewards.outcome import Outcome
from luyen.rewards.trl import arguments_of, is_trl

ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What the function is given for one answer, by keyword."""


def check_signature(path: str, name: str, arguments: Sequence[str]) -> None:
    """Raise a UserError unless the function exists and can be called with these keywords."""
    function = load_function(path, name, field=FILE_FIELD)
    if not takes(function, arguments):
        why = f"{path} defines `{name}` with other arguments than it will be called with"
        fix = f"define it as {name}({', '.join(arguments)}), or as TRL does: "
        fix += f"{name}(completions, **columns)"
        raise UserError(f"{FILE_FIELD}.name", name, why, fix)


def info_of(prompt: Prompt, rollout: Rollout) -> dict[str, Any]:
    """The row's `extra_info`; after a conversation, with what happened in it.

    `num_turns` counts assistant turns. `tool_calls` are the calls as plain data, `tool_rewards` is
    what tools thought of them, and `turn_scores` every reward that was given on the way.
    """
    info = dict(prompt.extra_info)
    if not (rollout.calls or rollout.messages or rollout.given):
        return info
    calls = [_plain(call) for call in rollout.calls]
    rewards = [call.reward for call in rollout.calls if call.reward is not None]
    given = [value for _, value in rollout.given]
    found = {"tool_calls": calls, "tool_rewards": rewards, "turn_scores": given}
    return info | {"num_turns": rollout.num_turns} | {k: v for k, v in found.items() if v}


def _plain(call: ToolCall) -> dict[str, Any]:
    return {
        "turn": call.turn,
        "name": call.name,
        "arguments": dict(call.arguments),
        "status": call.status.value,
        "result": call.result,
        "error": call.error,
        "reward": call.reward,
    }


def score_of(outcome: Outcome, path: str, name: str) -> Score:
    """A tree from what the function returned; its other numbers are parts that weigh nothing."""
    if outcome.error is not None:
        part = Score(name="score", value=None, error=outcome.error, seconds=outcome.seconds)
        return Score(name=ROOT, value=None, parts=(part,), error=outcome.error)
    if outcome.numbers is None:
        why = f"`{name}` in {path} returned {outcome.refused}, which is no score"
        fix = 'return a finite number, or a dict of them that holds "score"'
        raise UserError(FILE_FIELD, name, why, fix)
    numbers = dict(outcome.numbers)
    score = Score(name="score", value=numbers.pop("score"), seconds=outcome.seconds)
    if outcome.tree is not None:
        score = replace(outcome.tree, name="score", weight=1.0, seconds=outcome.seconds)
    others = [Score(name=n, value=value, weight=0.0) for n, value in numbers.items()]
    return total([score, *others])


@final
class CustomReward:
    """Judges every rollout by the user's function."""

    def __init__(
        self, path: str, name: str, more: Mapping[str, Any], *, executor: Executor
    ) -> None:
        """`more` are keyword arguments added to every call."""
        function = load_function(path, name, field=FILE_FIELD)
        self._trl = function if is_trl(function) else None
        if self._trl is None:
            check_signature(path, name, [*ONE, *more])
        self._path, self._name, self._more = path, name, dict(more)
        self._executor = executor

    @property
    def names(self) -> tuple[str, ...]:
        """`score`; what else the function returns shows in its first answer."""
        return ("score",)

    async def __call__(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        """One tree per rollout."""
        outcomes = await self._executor.run([self._call(prompt, r) for r in rollouts])
        for rollout, outcome in zip(rollouts, outcomes, strict=True):
            add_time(rollout, outcome.seconds)
        return [score_of(outcome, self._path, self._name) for outcome in outcomes]

    def _call(self, prompt: Prompt, rollout: Rollout) -> Call:
        if self._trl is not None:
            infos = [info_of(prompt, rollout)]
            columns = arguments_of(self._trl, [(prompt, rollout)], infos, self._more)
            return Call(name=self._name, source=self._path, arguments=columns)
        arguments = {
            "data_source": prompt.data_source,
            "solution_str": rollout.text,
            "ground_truth": prompt.ground_truth,
            "extra_info": info_of(prompt, rollout),
            **self._more,
        }
        return Call(name=self._name, source=self._path, arguments=arguments)
