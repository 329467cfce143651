"""The user's `compute_score`, called for each answer or once for all answers of a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, cast, final

from luyen.base.boundary import boundary, own_copy
from luyen.base.errors import UserError
from luyen.base.records import Prompt, Rollout, Score, ToolCall
from luyen.rewards.calls import (
    FILE_FIELD,
    Executor,
    ScoreCall,
    ScoreOutcome,
    add_time,
    attempt,
    outcome_of,
    short_repr,
)
from luyen.rewards.protocol import Group
from luyen.rewards.tree import ROOT, total
from luyen.rewards.user_functions import arguments_of, is_trl, load_function, takes, with_messages

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


def score_of(outcome: ScoreOutcome, path: str, name: str) -> Score:
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
    extra = [Score(name=n, value=value, weight=0.0) for n, value in numbers.items()]
    return total([score, *extra])


@final
class CustomReward:
    """Scores every rollout by the user's function."""

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

    def _call(self, prompt: Prompt, rollout: Rollout) -> ScoreCall:
        if self._trl is not None:
            infos = [info_of(prompt, rollout)]
            columns = arguments_of(self._trl, [(prompt, rollout)], infos, self._more)
            return ScoreCall(name=self._name, source=self._path, arguments=columns)
        arguments = {
            "data_source": prompt.data_source,
            "solution_str": rollout.text,
            "ground_truth": prompt.ground_truth,
            "extra_info": info_of(prompt, rollout),
            **self._more,
        }
        return ScoreCall(name=self._name, source=self._path, arguments=arguments)


# The batch variant: the user's function is called once for all answers of a step.

MANY = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""What the function is given, each a list with one entry per answer."""


@final
class BatchReward:
    """Calls `compute_score` with lists, and expects a list of scores back."""

    def __init__(self, path: str, name: str, more: Mapping[str, Any], *, timeout_s: float) -> None:
        if not is_trl(load_function(path, name, field=FILE_FIELD)):
            check_signature(path, name, [*MANY, *more])
        self._path, self._name, self._more = path, name, dict(more)
        self._timeout_s = timeout_s

    @property
    def names(self) -> tuple[str, ...]:
        """`score`; what else the function returns shows in its first answer."""
        return ("score",)

    async def __call__(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        """One tree per rollout of a single group."""
        return (await self.score_step([(prompt, rollouts)]))[0]

    async def score_step(self, groups: Sequence[Group]) -> list[list[Score]]:
        """One call for every rollout of every group."""
        flat = [(prompt, rollout) for prompt, rollouts in groups for rollout in rollouts]
        outcomes = iter(await self._outcomes(flat)) if flat else iter(())
        scores: list[list[Score]] = []
        for _, rollouts in groups:
            row: list[Score] = []
            for rollout in rollouts:
                outcome = next(outcomes)
                add_time(rollout, outcome.seconds)
                row.append(score_of(outcome, self._path, self._name))
            scores.append(row)
        return scores

    def _arguments(
        self, function: Callable[..., Any], flat: list[tuple[Prompt, Rollout]]
    ) -> dict[str, Any]:
        infos = [info_of(prompt, rollout) for prompt, rollout in flat]
        if is_trl(function):
            return arguments_of(function, flat, infos, self._more)
        return {
            "data_sources": [prompt.data_source for prompt, _ in flat],
            "solution_strs": [rollout.text for _, rollout in flat],
            "ground_truths": [prompt.ground_truth for prompt, _ in flat],
            "extra_infos": infos,
            **self._more,
        }

    async def _outcomes(self, flat: list[tuple[Prompt, Rollout]]) -> list[ScoreOutcome]:
        function = load_function(self._path, self._name, field=FILE_FIELD)
        start = perf_counter()
        given = own_copy(self._arguments(function, flat))
        given = with_messages(given) if is_trl(function) else given
        fault, found = await attempt(function, given, timeout_s=self._timeout_s)
        each_s = (perf_counter() - start) / len(flat)
        if fault is not None:
            return [replace(fault, seconds=each_s)] * len(flat)
        faults: list[BaseException] = []
        entries: list[Any] | None = None
        with boundary(faults):  # it may be a list of its own kind
            entries = list(cast(list[Any], found)) if isinstance(found, list | tuple) else None
        if entries is None or len(entries) != len(flat):
            what = f"{len(entries)} entries" if entries is not None else short_repr(found)
            why = f"`{self._name}` in {self._path} returned {what} for {len(flat)} answers"
            raise UserError(FILE_FIELD, self._name, why, "return a list with a score per answer")
        return [outcome_of(one, seconds=each_s) for one in entries]
