"""What a rollout costs the controller, from a few rollout workers to a thousand.

The workers are scripts in this process: they answer at once and say one answer at a time, which is
the most work for the controller. Routing, bookkeeping and the mailbox are those of a run on Ray;
what Ray itself takes for a message is not in it. The cost should not depend on how many there are.

    python benchmarks/controller_scale.py --workers 16 64 256 1024 --prompt 512
"""

import argparse
import gc
import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from luyen.rollout.protocol import Completion, Request, Sampling
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.messages import PollResult, ReplicaFacts, ReplyCallback

SAMPLING = Sampling(max_new_tokens=64)
TOKENS, LOGPS = tuple(range(64)), (-0.5,) * 64


class ScriptedWorker:
    """A worker whose answers are always the same."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._open: deque[tuple[str, int]] = deque()
        self._said = 0
        self._waiting: ReplyCallback | None = None

    def call(self, method: str, *arguments: Any, reply: ReplyCallback | None = None) -> None:
        """Take requests, or wait until something is to be said."""
        if method == "submit":
            requests: Sequence[Request] = arguments[1]
            self._open += [(r.id, i) for r in requests for i in range(len(r.keys))]
        elif method == "collect":
            self._waiting = reply
        elif reply is not None:
            reply(ReplicaFacts(pid=self._index, node="here", is_batch_invariant=True), None)

    def kill(self) -> None:
        """Nothing to end."""

    def finish_one(self) -> None:
        """Say the next answer, if somebody waits for it."""
        if self._waiting is None or not self._open:
            return
        name, sample = self._open.popleft()
        done = Completion(request=name, sample=sample, tokens=TOKENS, logps=LOGPS, reason="length")
        self._said += 1
        waiting, self._waiting = self._waiting, None
        waiting(PollResult(completions=(done,), end=self._said, passes=self._said), None)


def requests_of(count: int, *, samples: int, prompt: int) -> list[Request]:
    """Prompts that differ from their first token on."""
    keys = tuple(range(samples))
    return [
        Request(id=f"r{i}", tokens=tuple(range(i, i + prompt)), keys=keys, sampling=SAMPLING)
        for i in range(count)
    ]


def measure(workers: int, *, rollouts: int, samples: int, prompt: int) -> float:
    """Processor seconds of the controller for one rollout of a generation."""
    begun: list[ScriptedWorker] = []

    def start(index: int) -> ScriptedWorker:
        begun.append(ScriptedWorker(index))
        return begun[-1]

    engines = RayEngines(start, replicas=workers)
    asked = requests_of(rollouts // samples, samples=samples, prompt=prompt)
    gc.collect()
    spent, found = 0.0, 0
    before = time.thread_time()
    for request in asked:
        engines.submit(request)
    spent += time.thread_time() - before
    while not engines.is_idle:
        before = time.thread_time()
        found += len(engines.advance())
        spent += time.thread_time() - before
        for worker in begun:
            worker.finish_one()
    assert found == len(asked) * samples
    return spent / found


def main() -> None:
    """Print a line for each number of workers."""
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("--workers", type=int, nargs="+", default=[16, 64, 256, 1024])
    words.add_argument("--rollouts", type=int, default=32768, help="answers of a generation")
    words.add_argument("--samples", type=int, default=8, help="answers of each request")
    words.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    words.add_argument("--rounds", type=int, default=5)
    asked = words.parse_args()
    print("workers  rollouts  controller per rollout")
    for workers in asked.workers:
        costs = [
            measure(workers, rollouts=asked.rollouts, samples=asked.samples, prompt=asked.prompt)
            for _ in range(asked.rounds)
        ]
        print(f"{workers:7d}  {asked.rollouts:8d}  {median(costs) * 1e6:19.1f} us")


if __name__ == "__main__":
    main()
