"""The run's own engine as a judge."""

import asyncio
from dataclasses import replace
from typing import Any

from luyen.base.records import StopReason, make_prompt
from luyen.config.schema.judge import Judge
from luyen.data.render import Renderer
from luyen.data.tokenizer import load_tokenizer
from luyen.models.fresh import random_policy
from luyen.rewards.calls import Inline
from luyen.rewards.counts import Counts
from luyen.rewards.judge import Judges
from luyen.rollout.native.engine import NativeEngine
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import Draw, answering
from luyen.train.engine_judge import PURPOSE, EngineAsk
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
    def draw(draws: list[Draw], sampling: Sampling):
        batches.append([str(d.prompt.messages[-1]["content"]) for d in draws])
        found = answering(ENGINE, RENDERER, draws, sampling, seed=3, purpose=PURPOSE, version=0)()
        ended = [tuple(replace(r, stop=stop) for r in g.rollouts) for g in found]
        return [replace(g, rollouts=some) for g, some in zip(found, ended, strict=True)]

    return draw


def asked(*texts: str, **settings: Any) -> tuple[list[str], list[list[str]]]:
    batches: list[list[str]] = []
    ask = EngineAsk(RENDERER, longest=64)
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


def judged(ask: EngineAsk, *texts: str, **keys: Any):
    block = Judge(
        base_url="engine://", prompt="{answer}", parse="regex", pattern=r"(.)", retries=0, **keys
    )
    judges = Judges(own=ask, executor=Inline(timeout_s=1.0), cache=None, counts=Counts())
    prompt = make_prompt([{"role": "user", "content": "1+1="}])
    return asyncio.run(judges.judge(block)(prompt, [rollout(t) for t in texts]))


def test_a_question_that_does_not_fit_costs_its_own_score_only():
    ask = EngineAsk(RENDERER, longest=64)
    ask.connect(drawing([]))
    short, long = judged(ask, "1+1=", "1" * 80, max_tokens=4)
    assert "the engine holds 64" not in (short.error or "")
    assert (long.error or "").startswith("judge engine: UserError")


def test_an_engine_that_breaks_is_a_fault_of_those_who_asked():
    def broken(draws: Any, sampling: Any) -> Any:
        raise RuntimeError("out of pages")

    ask = EngineAsk(RENDERER, longest=64)
    ask.connect(broken)
    for score in judged(ask, "1+1=", "2+2=", max_tokens=4):
        assert (score.error or "").startswith("judge engine: RuntimeError: out of pages")


def test_a_reply_that_its_budget_ended_is_cut_off_whatever_it_says():
    ask = EngineAsk(RENDERER, longest=64)
    ask.connect(drawing([], StopReason.TOKEN_BUDGET))
    [score] = judged(ask, "1+1=", max_tokens=4)
    assert score.value is None
    assert (score.error or "").startswith("judge cut_off: max_tokens ended the reply")
