"""The user's function, called once for all answers of a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, cast, final

from luyen.base.errors import UserError
from luyen.base.foreign import boundary, own_copy
from luyen.base.records import Prompt, Rollout, Score
from luyen.rewards.calls import FILE_FIELD, attempt
from luyen.rewards.clock import add_time
from luyen.rewards.custom import check_signature, info_of, score_of
from luyen.rewards.loading import load_function
from luyen.rewards.outcome import Outcome, outcome_of, shown
from luyen.rewards.protocol import Group
from luyen.rewards.trl import arguments_of, is_trl, with_messages

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

    async def _outcomes(self, flat: list[tuple[Prompt, Rollout]]) -> list[Outcome]:
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
            what = f"{len(entries)} entries" if entries is not None else shown(found)
            why = f"`{self._name}` in {self._path} returned {what} for {len(flat)} answers"
            raise UserError(FILE_FIELD, self._name, why, "return a list with a score per answer")
        return [outcome_of(one, seconds=each_s) for one in entries]
