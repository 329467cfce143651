"""Environments as users of the `verifiers` package write them (0.4)."""

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field
from small_sums import SmallSums, SumConfig, SumData, SumTask


class Notes(vf.State):
    seen: list[str] = Field(default_factory=list)


class LookupConfig(vf.ToolsetConfig):
    pass


class Lookup(vf.Toolset[LookupConfig, Notes]):
    async def setup_task(self, task) -> None:
        self.secret = task.answer

    @vf.tool
    async def fetch(self, place: str) -> str:
        """Fetch what lies at a place."""
        self.state.seen.append(place)
        return f"{self.secret}{len(self.state.seen)}"


class SecretTask(vf.Task[SumData, Notes, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Lookup(LookupConfig())]

    @vf.reward
    async def looked(self, trace) -> float:
        results = [m.content for m in trace.tool_messages]
        return float(trace.state.seen == ["here", "there"] and trace.last_reply in results)


class Secrets(vf.Taskset[SecretTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SecretTask]:
        yield SecretTask(SumData(prompt="Look.", answer="7"), self.config.task)


class GameConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    rounds: int = 2


class Game(vf.Env[GameConfig]):
    """Asks `again` until the rounds are over; a program that drives the agent."""

    async def run(self, task, agents):
        said = []
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            while not segment.terminated:
                said.append(segment.last_reply)
                if len(said) == self.config.rounds:
                    break
                segment = await talk.turn("again")
        talk.trace.record_reward("rounds", len(said), 0.5)

    async def finalize(self, task, episode):
        episode.traces[0].record_reward("late", 10.0)


class DuetConfig(vf.EnvConfig):
    one: vf.AgentConfig = vf.AgentConfig()
    two: vf.AgentConfig = vf.AgentConfig()


class Duet(vf.Env[DuetConfig]):
    async def run(self, task, agents):
        await agents.one.run(task)


class BrokenTask(SumTask):
    @vf.reward
    async def broken(self, trace) -> float:
        raise ValueError("no verdict")


class BrokenSums(vf.Taskset[BrokenTask, SumConfig]):
    def load(self) -> Iterator[BrokenTask]:
        yield BrokenTask(SumData(prompt="1+1=", answer="2"), self.config.task)


class BoxTask(SumTask):
    @vf.reward
    async def file(self, trace, runtime) -> float:
        return float(await runtime.read("answer.txt"))


class BoxSums(vf.Taskset[BoxTask, SumConfig]):
    def load(self) -> Iterator[BoxTask]:
        yield BoxTask(SumData(prompt="1+1=", answer="2"), self.config.task)


class StopTask(SumTask):
    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return True


class StopSums(vf.Taskset[StopTask, SumConfig]):
    def load(self) -> Iterator[StopTask]:
        yield StopTask(SumData(prompt="1+1=", answer="2"), self.config.task)


class Hanging(vf.Env[GameConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            await talk.turn()
            await asyncio.sleep(60)


class Silent(vf.Env[GameConfig]):
    async def run(self, task, agents):
        pass


class Twice(vf.Env[GameConfig]):
    async def run(self, task, agents):
        await agents.player.run(task)
        await agents.player.run(task)


def sums(**config):
    return SmallSums(SumConfig(**config))


def secrets():
    return Secrets(vf.TasksetConfig())


def broken():
    return BrokenSums(SumConfig())


def box():
    return BoxSums(SumConfig())


def stopping():
    return StopSums(SumConfig())


def played(kind: str, **config):
    kinds = {"Game": Game, "Hanging": Hanging, "Silent": Silent, "Twice": Twice, "Duet": Duet}
    settings = DuetConfig if kind == "Duet" else GameConfig
    return kinds[kind](settings(taskset={"id": "small_sums"}, **config))


def nothing():
    return 7
