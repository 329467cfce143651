"""Rollouts held against a rendering later: nothing is lost by it, and nothing done twice."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.records import Prompt, Rollout, Source
from luyen.data.render import Renderer
from luyen.rollout.conversation_config import ConversationConfig
from luyen.rollout.multi_turn import Conversations
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import Group
from luyen.rollout.tools.python_tools import tool
from luyen.rollout.tools.registry import ToolRegistry
from luyen.rollout.transcript import check_retokenization
from luyen.runtime.generation import Generation
from tests.talk import KEEP, TOKENIZER, ScriptedEngine, World, call, converse, draws, setting
from tests.unit.data.families import family_renderer

SAMPLING = Sampling(max_new_tokens=400, stop_ids=TOKENIZER.stop_ids)
HERE = {"seed": 0, "purpose": "rollout", "version": 3}
COUNTS = ("drift", "sampled_differs", "retokenised")


@tool
async def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@tool
async def broken(a: int) -> str:
    """Break."""
    raise RuntimeError("broken")


def asks_then_answers(text: str, _: int) -> str:
    return "3<|im_end|>" if "<tool_response>" in text else call("add", a=1, b=2) + "<|im_end|>"


def says(line: str) -> ScriptedEngine:
    return ScriptedEngine(lambda *_: f"{line}<|im_end|>")


class Spelling:
    """Writes every character as a token of its own, also where there is one for several."""

    def decode(self, ids, **how: Any) -> str:
        return TOKENIZER.decode(ids, **how)

    def encode(self, text: str) -> list[int]:
        said = text.removesuffix("<|im_end|>")
        spelled = [token for mark in said for token in TOKENIZER.encode(mark)]
        return spelled + TOKENIZER.encode(text[len(said) :])


def talks_of(
    engine: Any, how: ConversationConfig, *questions: str, samples: int = 1
) -> list[Group]:
    """The conversations as they come from the engine."""
    wanted = draws(how, *(questions or ("1+2=",)), samples=samples)
    return asyncio.run(converse(engine, how, wanted, SAMPLING, policy=KEEP, **HERE))


def one_of(engine: Any, how: ConversationConfig, *questions: str) -> tuple[Rollout, Prompt]:
    [group] = talks_of(engine, how, *questions)
    [rollout] = group.rollouts
    return rollout, group.prompt


def damaged(rollout: Rollout, source: Source, to: str) -> Rollout:
    """The rollout with another character as the last one that came from there."""
    [mark] = TOKENIZER.encode(to)
    place = max(i for i, found in enumerate(rollout.sources) if found == source)
    assert rollout.tokens[place] != mark
    tokens = (*rollout.tokens[:place], mark, *rollout.tokens[place + 1 :])
    return replace(rollout, tokens=tokens)


def test_a_rollout_says_that_nobody_has_compared_it_yet_until_somebody_has():
    how = setting([add])
    rollout, prompt = one_of(ScriptedEngine(asks_then_answers), how)
    assert rollout.notes["unchecked"] == 1.0
    assert not set(COUNTS) & set(rollout.notes)
    found = check_retokenization(rollout, prompt, how)
    assert {name: found.notes[name] for name in COUNTS} == dict.fromkeys(COUNTS, 0.0)
    rest = {name: note for name, note in found.notes.items() if name not in COUNTS}
    assert {**rest, "unchecked": 1.0} == rollout.notes
    assert replace(found, notes=rollout.notes) == rollout, "nothing else is touched"


def test_what_was_compared_is_given_back_as_it_is():
    how = setting([add])
    rollout, prompt = one_of(ScriptedEngine(asks_then_answers), how)
    once = check_retokenization(rollout, prompt, how)
    assert once is not rollout
    assert check_retokenization(once, prompt, how) is once


def test_where_nothing_is_to_be_compared_there_is_no_such_note():
    how = setting([add], sanity="off")
    rollout, prompt = one_of(ScriptedEngine(asks_then_answers), how)
    assert not {"unchecked", *COUNTS} & set(rollout.notes)
    assert check_retokenization(rollout, prompt, how) is rollout


def test_a_conversation_with_a_world_is_compared_at_once():
    how = setting(env=lambda _: World())
    rollout, prompt = one_of(says("ok"), how)
    assert "unchecked" not in rollout.notes
    assert {name: rollout.notes[name] for name in COUNTS} == dict.fromkeys(COUNTS, 0.0)
    assert check_retokenization(rollout, prompt, how) is rollout


def test_a_conversation_that_broke_is_not_to_be_compared():
    how = setting(box=ToolRegistry([broken], on_error="fault"))
    rollout, prompt = one_of(says(call("broken", a=1)), how)
    assert rollout.fault is not None
    assert "unchecked" not in rollout.notes
    assert check_retokenization(rollout, prompt, how) is rollout


def test_turns_whose_text_has_other_tokens_are_counted():
    engine = ScriptedEngine(lambda *_: "<think>3<|im_end|>", Spelling())
    rollout, prompt = one_of(engine, setting())
    assert rollout.response_length == len("<think>3") + 1
    found = check_retokenization(rollout, prompt, setting())
    assert [found.notes[name] for name in COUNTS] == [0.0, 0.0, 1.0]


def test_what_earlier_branches_were_found_to_be_is_added_to():
    how = setting()
    rollout, prompt = one_of(ScriptedEngine(lambda *_: "<think>3<|im_end|>", Spelling()), how)
    before = {"drift": 0.0, "sampled_differs": 2.0, "retokenised": 3.0}
    found = check_retokenization(replace(rollout, notes={**rollout.notes, **before}), prompt, how)
    assert [found.notes[name] for name in COUNTS] == [0.0, 2.0, 4.0]


def test_what_a_template_would_write_in_other_words_is_counted():
    shown = family_renderer("llama3")
    how = setting(tokenizer=shown.tokenizer)
    engine = ScriptedEngine(lambda *_: "  3<|eot_id|>", shown.tokenizer)
    sampling = replace(SAMPLING, stop_ids=shown.tokenizer.stop_ids)
    wanted = draws(how, "1+2=")
    [group] = asyncio.run(converse(engine, how, wanted, sampling, policy=KEEP, **HERE))
    found = check_retokenization(group.rollouts[0], group.prompt, how)
    assert [found.notes[name] for name in COUNTS] == [0.0, 1.0, 0.0]


def test_damage_to_what_the_policy_did_not_say_stops_the_run():
    how = setting([add])
    rollout, prompt = one_of(ScriptedEngine(asks_then_answers), how)
    for source, place in ((Source.TOOL, "what follows turn 0"), (Source.PROMPT, "the prompt")):
        with pytest.raises(UserError, match=f"token ids differ .*{place}"):
            check_retokenization(damaged(rollout, source, "7"), prompt, how)


def test_damage_of_white_space_is_counted_where_it_is_to_be_ignored():
    rollout, prompt = one_of(ScriptedEngine(asks_then_answers), setting([add]))
    odd = damaged(rollout, Source.TEMPLATE, " ")
    with pytest.raises(UserError, match="token ids differ"):
        check_retokenization(odd, prompt, setting([add]))
    found = check_retokenization(odd, prompt, setting([add], sanity="ignore_strippable"))
    assert found.notes["drift"] == 1.0
    assert found.tokens == odd.tokens


def test_all_rollouts_of_a_generation_are_compared_with_their_own_prompts():
    how = setting([add])
    talks = Conversations(how, KEEP)
    made = Generation(renderer=how.renderer, seed=0, conversations=talks)
    wanted = draws(how, "1+2=", "22+33=", samples=2)
    engine = ScriptedEngine(asks_then_answers)
    groups = made.play(engine, wanted, SAMPLING, purpose="rollout", version=3)
    talks.close()
    assert {r.notes["unchecked"] for group in groups for r in group.rollouts} == {1.0}
    found = made.all_compared(groups)
    assert found == [
        replace(g, rollouts=tuple(check_retokenization(r, g.prompt, how) for r in g.rollouts))
        for g in groups
    ]
    assert [r.key for g in found for r in g.rollouts] == [r.key for g in groups for r in g.rollouts]
    assert {r.notes["drift"] for group in found for r in group.rollouts} == {0.0}
    first, second = groups
    mixed = [replace(first, prompt=second.prompt)]
    with pytest.raises(UserError, match="the prompt has"):
        made.all_compared(mixed)


def test_answers_of_one_turn_have_nothing_to_be_compared():
    how = setting()
    made = Generation(renderer=Renderer(TOKENIZER), seed=0)
    groups = made.play(says("3"), draws(how, "1+2=", samples=2), SAMPLING, purpose="x", version=0)
    found = made.all_compared(groups)
    assert found == groups
    assert all(a is b for a, b in zip(found[0].rollouts, groups[0].rollouts, strict=True))
    assert "unchecked" not in groups[0].rollouts[0].notes
