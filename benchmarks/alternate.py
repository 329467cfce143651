"""What the benchmarks share: the work of a round, and sides that take turns at it."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one round does. Every side answers each prompt `samples` times with `new_tokens`."""

    model: str
    dtype: str
    prompts: int
    samples: int
    new_tokens: int
    prompt_tokens: tuple[int, int]
    rounds: int
    threads: int = 1
    device: str = "cpu"
    init: str = "pretrained"
    """`random`: the model's shape with fresh weights."""

    @property
    def drawn(self) -> int:
        """Tokens that a round draws."""
        return self.prompts * self.samples * self.new_tokens

    def tokens(self) -> list[list[int]]:
        """Prompts whose lengths span the given range; their words mean nothing."""
        low, high = self.prompt_tokens
        sizes = [low + (high - low) * i // max(1, self.prompts - 1) for i in range(self.prompts)]
        return [[(97 * i + 31 * j) % 9000 + 100 for j in range(n)] for i, n in enumerate(sizes)]


def alternate(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each action, taken in turns; the first round warms up.

    An action may tell the seconds itself.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    for round_ in range(rounds + 1):
        for name, action in actions.items():
            start = time.perf_counter()
            told = action()
            passed = time.perf_counter() - start
            if round_:
                times[name].append(told if isinstance(told, float) else passed)
    return {name: statistics.median(some) for name, some in times.items()}
