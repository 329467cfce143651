"""Every shipped rule on answers that were written to break it: a score each, and no fault."""

import asyncio
import inspect
from time import process_time
from types import SimpleNamespace
from typing import Any

import pytest

from luyen.base.records import Prompt
from luyen.rewards.build import build_reward
from luyen.rewards.calls import (
    FallbackExecutor,
    InlineExecutor,
    ScoreCall,
    ScoreOutcome,
    ScoringCounters,
)
from luyen.rewards.rules.all import rule_rewards
from luyen.rewards.rules.ifeval import CHECKS
from tests.unit.rewards.builders import answer, config, group, prompt
from tests.unit.rewards.hostile_answers import HOSTILE

SETTINGS: dict[str, Any] = {
    "num_placeholders": 2,
    "postscript_marker": "P.S.",
    "num_bullets": 2,
    "num_highlights": 2,
    "section_spliter": "Section",
    "num_sections": 2,
    "prompt_to_repeat": "a",
    "end_phrase": "x",
    "keywords": ["tea"],
    "keyword": "tea",
    "frequency": 2,
    "relation": "at least",
    "forbidden_words": ["tea"],
    "letter": "q",
    "let_frequency": 3,
    "let_relation": "at least",
    "num_words": 3,
    "num_sentences": 2,
    "num_paragraphs": 2,
    "nth_paragraph": 1,
    "first_word": "tea",
    "capital_frequency": 2,
    "capital_relation": "at least",
}
TASK = {"dataset": "products", "entry": {"question": "4 * 1", "answer": "4", "metadata": {}}}
SCHEMA = {"type": "object", "additionalProperties": {"$ref": "#"}}


def instructions() -> Prompt:
    """A row with every instruction that there is."""
    known = {name: inspect.signature(CHECKS[name]).parameters for name in CHECKS}
    ids = [name for name in known if not name.startswith("language")]
    kwargs = [{key: SETTINGS[key] for key in known[name] if key in SETTINGS} for name in ids]
    return prompt(None, instruction_id_list=ids, kwargs=kwargs)


INLINE: dict[str, tuple[str, Prompt, dict[str, Any]]] = {
    "exact": ("exact", prompt("12"), {"ignore_case": True}),
    "numeric": ("numeric", prompt("12"), {"tolerance": 0.1}),
    "gsm8k": ("gsm8k", prompt("#### 12"), {}),
    "gsm8k, flexible": ("gsm8k", prompt("12"), {"method": "flexible"}),
    "choice": ("choice", prompt("A"), {}),
    "json": ("json", prompt(), {"required": ["a"]}),
    "ifeval": ("ifeval", instructions(), {"credit": "share"}),
    "ifeval, loose": ("ifeval", instructions(), {"mode": "loose"}),
}
ISOLATED: dict[str, tuple[Prompt, dict[str, Any]]] = {
    "math": (prompt("12"), {}),
    "regex": (prompt(), {"pattern": "(a+)+b|(\\s*)*x|(9|9)*!"}),
    "json_schema": (prompt(), {"schema": SCHEMA}),
    "reasoning_gym": (prompt("4", reasoning_gym=TASK), {}),
    "tool_safety": (prompt(), {"canaries": ["a-word"]}),
}
COUNTED = {"length", "overlong", "cosine", "repetition", "given", "code"}
"""Rules that read no text of the answer; programs have tests of their own."""


def test_every_rule_that_reads_answers_is_here():
    named = {rule for rule, _, _ in INLINE.values()} | set(ISOLATED) | COUNTED
    shipped = {n for n in rule_rewards if rule_rewards.get(n).__module__.startswith("luyen.")}
    assert shipped - named == {"tool_cost", "tool_needless", "tool_success", "tool_valid"}
    read = {rule for rule, _, _ in INLINE.values()} | set(ISOLATED)
    assert all("wrong" in rule_rewards.facts(rule) for rule in read)
    assert len(HOSTILE) >= 25


@pytest.mark.parametrize("name", INLINE)
def test_rules_on_the_thread_of_the_loop_give_a_score_in_little_time(name):
    rule, row, hparams = INLINE[name]
    counts = ScoringCounters()
    executor = FallbackExecutor(InlineExecutor(timeout_s=10.0), counts)
    for what, text in HOSTILE.items():
        arguments = {"prompt": row, "answer": answer(text), **hparams}
        call = ScoreCall(name=rule, source=None, rule=True, arguments=arguments)
        start = process_time()
        [outcome] = asyncio.run(executor.run([call]))
        assert outcome.numbers is not None, f"{what}: {outcome.error}"
        assert 0.0 <= outcome.numbers["score"] <= 1.0
        assert process_time() - start < 5, what
    assert counts.take() == {}, "none of them may need a stand-in"


@pytest.mark.parametrize("rule", ISOLATED)
def test_rules_in_processes_of_their_own_give_a_score_whatever_the_answer(rule):
    row, hparams = ISOLATED[rule]
    parts = {rule: {"rule": rule, "kwargs": hparams}}
    settings = config(components=parts, timeout_s=2.0, num_workers=2, memory_mb=2048)
    with build_reward(settings, max_response_length=16) as reward:
        [judged] = reward.score([group(row, *HOSTILE.values())])
        counted = reward.take_counts()
    faults = {w: s.error for w, s in zip(HOSTILE, judged.scores, strict=True) if s.value is None}
    assert faults == {}
    lowest, highest = (-1.0, 0.0) if rule == "tool_safety" else (0.0, 1.0)
    assert all(lowest <= (s.value or 0.0) <= highest for s in judged.scores)
    hard = counted.get(f"judging/unjudgeable/{rule}", 0.0)
    assert hard > 0 if rule in ("math", "regex") else hard < len(HOSTILE)


def test_a_rule_that_cannot_judge_an_empty_answer_either_is_a_fault():
    parts = {"shape": {"rule": "regex", "kwargs": {"pattern": "(" * 5000 + ")" * 5000}}}
    settings = config(components=parts, timeout_s=2.0, num_workers=1)
    with build_reward(settings, max_response_length=16) as reward:
        [judged] = reward.score([group(prompt(), "a")])
        counted = reward.take_counts()
    assert judged.scores[0].value is None
    assert "for an empty answer" in (judged.scores[0].error or "")
    assert counted == {}


def test_a_row_that_cannot_judge_is_told_as_such_though_the_answer_came_first():
    async def run(calls):
        errors = [ScoreOutcome(error="late"), ScoreOutcome(error="no truth", is_unscorable=True)]
        return [errors[not call.arguments["answer"].text] for call in calls]

    call = ScoreCall(name="math", source=None, rule=True, arguments={"answer": answer("x")})
    [outcome] = asyncio.run(
        FallbackExecutor(SimpleNamespace(run=run), ScoringCounters()).run([call])
    )
    assert (outcome.error, outcome.is_unscorable) == ("no truth", True)


def test_a_process_that_died_once_is_asked_again():
    asked: list[str] = []

    async def run(calls):
        asked.extend(call.arguments["answer"].text for call in calls)
        dead = ScoreOutcome(error="the process ended", is_dead=True)
        return [dead if len(asked) == 1 else ScoreOutcome(numbers={"score": 1.0})]

    call = ScoreCall(name="math", source=None, rule=True, arguments={"answer": answer("x")})
    [outcome] = asyncio.run(
        FallbackExecutor(SimpleNamespace(run=run), ScoringCounters()).run([call])
    )
    assert (outcome.numbers, asked) == ({"score": 1.0}, ["x", "x"])
