"""From easy to hard: rows ordered by a number they carry, in stages that grow."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.records import Prompt
from luyen.base.seeds import derive_key, shuffled
from luyen.base.suggest import did_you_mean
from luyen.data.samplers.protocol import KWARGS, State, samplers


@samplers.register("curriculum")
@final
class Curriculum:
    """Stage s of S draws from the easiest s/S of the rows, shuffled; the last stage from all.

    Without `promote_at` a stage is one pass over its rows, and the stage is a function of the
    cursor. With it the next stage begins when the policy succeeds that often, and the state is two
    integers: the stage, and the cursor at which it began.

    Example:
        >>> from luyen.data.sources import load_dataset
        >>> rows = load_dataset(["arithmetic://sum?size=40"]).prompts
        >>> easy = Curriculum(rows, seed=0, key="difficulty", stages=4).take(0, 10)
        >>> hard = Curriculum(rows, seed=0, key="difficulty", stages=4).take(70, 10)
        >>> level = lambda drawn: max(rows[i].extra_info["difficulty"] for i in drawn)
        >>> level(easy) <= level(hard)
        True
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        key: str,
        stages: int = 4,
        promote_at: float | None = None,
    ) -> None:
        """`key` names a number in `extra_info`, larger for harder rows."""
        if stages < 1 or stages > len(prompts):
            why = f"{len(prompts)} rows make from 1 to {len(prompts)} stages"
            raise UserError(f"{KWARGS}.stages", stages, why, "choose within")
        if promote_at is not None and not 0 < promote_at <= 1:
            why = "a share of successes lies above 0 and at most at 1"
            raise UserError(f"{KWARGS}.promote_at", promote_at, why, "give 0.7, for instance")
        values = [_difficulty(prompt, key) for prompt in prompts]
        self._easiest = sorted(range(len(prompts)), key=lambda i: (values[i], i))
        self._sizes = [len(prompts) * (stage + 1) // stages for stage in range(stages)]
        self._promote_at = promote_at
        self.state: State = (0, 0)
        self._seed = seed
        self._order = lru_cache(maxsize=4)(self._epoch)

    def take(self, cursor: int, count: int) -> list[int]:
        """The rows of `count` draws from `cursor` on, under the present state."""
        return [self._draw(position) for position in range(cursor, cursor + count)]

    def record(self, cursor: int, success: float) -> None:
        """Begin the next stage at `cursor` when the policy succeeds often enough."""
        stage = self.state[0]
        if self._promote_at is None or stage + 1 == len(self._sizes):
            return
        if success >= self._promote_at:
            self.state = (stage + 1, cursor)

    def _epoch(self, stage: int, epoch: int) -> list[int]:
        return shuffled(
            self._sizes[stage], derive_key(self._seed, "sampler/curriculum", stage, epoch)
        )

    def _draw(self, position: int) -> int:
        stage, start = self.state if self._promote_at is not None else self._stage_of(position)
        assert position >= start, "a draw from before the stage began"
        epoch, place = divmod(position - start, self._sizes[stage])
        return self._easiest[self._order(stage, epoch)[place]]

    def _stage_of(self, position: int) -> tuple[int, int]:
        """The stage of a draw and the draw at which it began."""
        start = 0
        for stage, size in enumerate(self._sizes[:-1]):
            if position < start + size:
                return stage, start
            start += size
        return len(self._sizes) - 1, start


def _difficulty(prompt: Prompt, key: str) -> float:
    value: Any = prompt.extra_info.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        if key not in prompt.extra_info:
            fix = did_you_mean(key, prompt.extra_info)
            raise UserError(f"{KWARGS}.key", key, "a row's extra_info lacks it", fix)
        why = f"a row's extra_info has {value!r} there, which is no number"
        raise UserError(f"{KWARGS}.key", key, why, "choose a key with numbers")
    return float(value)
