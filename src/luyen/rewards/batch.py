"""The user's function, called once for all answers of a step."""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.records import Prompt, Rollout, Score
from luyen.rewards.calls import FILE_FIELD, attempt
from luyen.rewards.clock import add_time
from luyen.rewards.custom import check_signature, info_of, score_of
from luyen.rewards.loading import load_function
from luyen.rewards.outcome import Outcome, outcome_of, shown
from luyen.rewards.protocol import Group

MANY = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""What the function is given, each a list with one entry per answer."""


@final
class BatchReward:
    """Calls `compute_score` with lists, and expects a list of scores back."""

    def __init__(self, path: str, name: str, more: Mapping[str, Any], *, timeout_s: float) -> None:
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

    async def _outcomes(self, flat: list[tuple[Prompt, Rollout]]) -> list[Outcome]:
        function = load_function(self._path, self._name, field=FILE_FIELD)
        columns = {
            "data_sources": [prompt.data_source for prompt, _ in flat],
            "solution_strs": [rollout.text for _, rollout in flat],
            "ground_truths": [prompt.ground_truth for prompt, _ in flat],
            "extra_infos": [info_of(prompt, rollout) for prompt, rollout in flat],
        }
        start = perf_counter()
        fault, found = await attempt(function, {**columns, **self._more}, timeout_s=self._timeout_s)
        each_s = (perf_counter() - start) / len(flat)
        if fault is not None:
            return [Outcome(error=fault, seconds=each_s)] * len(flat)
        if not isinstance(found, list | tuple) or len(found) != len(flat):
            what = f"{len(found)} entries" if isinstance(found, list | tuple) else shown(found)
            why = f"`{self._name}` in {self._path} returned {what} for {len(flat)} answers"
            raise UserError(FILE_FIELD, self._name, why, "return a list with a score per answer")
        return [outcome_of(one, seconds=each_s) for one in found]
