"""An environment as a package that is installed exports it."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SmallSums"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def exact(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class SumConfig(vf.TasksetConfig):
    most: int = 3


class SmallSums(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> Iterator[SumTask]:
        for n in range(self.config.most):
            data = SumData(prompt=f"{n}+1=", system_prompt="Add.", answer=str(n + 1))
            yield SumTask(data, self.config.task)
