"""The run's own engine as a judge."""

import asyncio
from dataclasses import replace
from typing import Any

from luyen.base.records import StopReason, make_prompt
from luyen.config.schema.reward import JudgeConfig
from luyen.data.render import Renderer
from luyen.data.tokenizer import load_tokenizer
from luyen.models.random_policy import random_policy
from luyen.rewards.calls import InlineExecutor, ScoringCounters
from luyen.rewards.llm_judge.judge_reward import JudgeFactory
from luyen.rollout.native.engine import NativeEngine
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import PromptRequest, submit_requests
from luyen.train.builders.reward import JUDGE_PURPOSE, EngineJudge
from tests.unit.rewards.builders import rollout

TOKENIZER = load_tokenizer("builtin://arithmetic")
RENDERER = Renderer(TOKENIZER)
ENGINE = NativeEngine(
    random_policy(),
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=256,
    decode=TOKENIZER.decode,
)


def drawing(batches: list[list[str]], stop: StopReason = StopReason.ANSWERED):
    def draw(draws: list[PromptRequest], sampling: Sampling):
        batches.append([str(d.prompt.messages[-1]["content"]) for d in draws])
        found = submit_requests(
            ENGINE, RENDERER, draws, sampling, seed=3, purpose=JUDGE_PURPOSE, version=0
        )()
        ended = [tuple(replace(r, stop=stop) for r in g.rollouts) for g in found]
        return [replace(g, rollouts=some) for g, some in zip(found, ended, strict=True)]

    return draw


def asked(*texts: str, **settings: Any) -> tuple[list[str], list[list[str]]]:
    batches: list[list[str]] = []
    ask = EngineJudge(RENDERER, longest=64)
    ask.connect(drawing(batches))

    async def all_of_them() -> list[str]:
        given = {"max_tokens": 4, "temperature": 1.0} | settings
        messages = [[{"role": "user", "content": text}] for text in texts]
        return await asyncio.gather(*(ask(one, given) for one in messages))

    return asyncio.run(all_of_them()), batches


def test_questions_that_come_together_are_drawn_together_and_equal_ones_once():
    replies, batches = asked("1+1=", "2+2=", "1+1=")
    assert batches == [["1+1=", "2+2="]]
    assert replies[0] == replies[2]
    assert asked("2+2=")[0] == [replies[1]]
    assert asked("1+1=", "2+2=", "1+1=")[0] == replies


def judged(ask: EngineJudge, *texts: str, **keys: Any):
    block = JudgeConfig(
        base_url="engine://", prompt="{answer}", parse="regex", pattern=r"(.)", retries=0, **keys
    )
    judges = JudgeFactory(
        own=ask, executor=InlineExecutor(timeout_s=1.0), cache=None, counts=ScoringCounters()
    )
    prompt = make_prompt([{"role": "user", "content": "1+1="}])
    return asyncio.run(judges.judge(block)(prompt, [rollout(t) for t in texts]))


def test_a_question_that_does_not_fit_costs_its_own_score_only():
    ask = EngineJudge(RENDERER, longest=64)
    ask.connect(drawing([]))
    short, long = judged(ask, "1+1=", "1" * 80, max_tokens=4)
    assert "the engine holds 64" not in (short.error or "")
    assert (long.error or "").startswith("judge engine: UserError")


def test_an_engine_that_breaks_is_a_fault_of_those_who_asked():
    def broken(draws: Any, sampling: Any) -> Any:
        raise RuntimeError("out of pages")

    ask = EngineJudge(RENDERER, longest=64)
    ask.connect(broken)
    for score in judged(ask, "1+1=", "2+2=", max_tokens=4):
        assert (score.error or "").startswith("judge engine: RuntimeError: out of pages")


def test_a_reply_that_its_budget_ended_is_cut_off_whatever_it_says():
    ask = EngineJudge(RENDERER, longest=64)
    ask.connect(drawing([], StopReason.TOKEN_BUDGET))
    [score] = judged(ask, "1+1=", max_tokens=4)
    assert score.value is None
    assert (score.error or "").startswith("judge cut_off: max_tokens ended the reply")
