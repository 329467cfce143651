"""A thousand conversations at once whose tools sleep: does anything wait that need not?

The built-in model answers sums; whatever it says is read as a call of a tool that sleeps, up to a
number of turns. Wall time is compared with the larger of what the engine computed and the longest
chain of sleeps, and memory is looked at after every round.

    python benchmarks/tool_concurrency.py --rollouts 1000 --rounds 5
"""

import argparse
import asyncio
import resource
import time
from pathlib import Path

import torch

from luyen.base.process_setup import prepare_process
from luyen.base.records import GroupId, Rollout, make_prompt
from luyen.base.seeds import derive_key, uniform
from luyen.config.schema.model import ModelConfig
from luyen.data.render import Renderer
from luyen.data.tokenizer import load_tokenizer
from luyen.models.load import load_policy
from luyen.rollout.conversation_config import ConversationConfig
from luyen.rollout.conversation_state import TurnLimits
from luyen.rollout.multi_turn import FaultPolicy, run_conversations
from luyen.rollout.native.engine import NativeEngine
from luyen.rollout.parsers.protocol import ParsedTurn, WrittenCall
from luyen.rollout.protocol import Completion, Sampling
from luyen.rollout.single_turn import PromptRequest
from luyen.rollout.tools.python_tools import tool
from luyen.rollout.tools.registry import ToolRegistry

SHORTEST_S, LONGEST_S = 0.05, 2.0


@tool(concurrency=10_000, timeout_s=60)
async def rest(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "ok"


def sleepy(text: str) -> ParsedTurn:
    """Any turn as a call; how long it sleeps depends on what was said."""
    share = uniform(derive_key(0, "sleep", text), 0)
    seconds = SHORTEST_S + share * (LONGEST_S - SHORTEST_S)
    call = WrittenCall(name="rest", arguments={"seconds": seconds})
    return ParsedTurn(content=text, calls=(call,))


class Timed:
    """An engine, and the seconds that it computed."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self.submit, self.abort, self.close = engine.submit, engine.abort, engine.close
        self.seconds = 0.0

    @property
    def is_idle(self) -> bool:
        """As the engine says."""
        return self._engine.is_idle

    def advance(self) -> list[Completion]:
        """One pass, timed."""
        start = time.perf_counter()
        found = self._engine.advance()
        self.seconds += time.perf_counter() - start
        return found


def chain(rollout: Rollout) -> float:
    """Seconds that the tools of a conversation slept, one after the other."""
    return sum(float(call.arguments["seconds"]) for call in rollout.calls)


def resident_mib() -> float:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    """Play the rounds and print a line for each."""
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("--rollouts", type=int, default=1000)
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--turns", type=int, default=3)
    asked = words.parse_args()
    prepare_process()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer("builtin://arithmetic")
    path = "builtin://arithmetic"
    policy = load_policy(ModelConfig(path=path), device="cpu", vocabulary=tokenizer.size)
    setting = ConversationConfig(
        renderer=Renderer(tokenizer),
        parser=sleepy,
        tools=ToolRegistry([rest]),
        make_env=lambda _: None,
        limits=TurnLimits(max_assistant_turns=asked.turns),
        max_prompt_length=256,
        max_response_length=256,
    )
    sampling = Sampling(max_new_tokens=16, stop_ids=tokenizer.stop_ids)
    print("round  wall  engine  longest chain  wall / larger  memory")
    for number in range(asked.rounds):
        prompts = [
            make_prompt([{"role": "user", "content": f"{i % 90 + 10}+{i // 90 % 90 + number}="}])
            for i in range(asked.rollouts)
        ]
        draws = [
            PromptRequest(group=GroupId(step=number, draw=i, uid=p.uid), prompt=p, samples=1)
            for i, p in enumerate(prompts)
        ]
        engine = Timed(
            NativeEngine(
                policy,
                max_model_len=512,
                max_num_seqs=512,
                max_num_batched_tokens=8192,
                decode=tokenizer.decode,
            )
        )
        start = time.perf_counter()
        groups = asyncio.run(
            run_conversations(
                engine,
                setting,
                draws,
                sampling,
                seed=0,
                purpose="rollout",
                version=0,
                policy=FaultPolicy(on_fault="fail"),
            )
        )
        wall = time.perf_counter() - start
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        assert all(rollout.fault is None for rollout in rollouts)
        longest = max(map(chain, rollouts))
        larger = max(engine.seconds, longest)
        print(
            f"{number:5d}  {wall:4.1f}  {engine.seconds:6.1f}  {longest:13.1f}  "
            f"{wall / larger:13.2f}  {resident_mib():.0f} MiB"
        )


if __name__ == "__main__":
    main()
