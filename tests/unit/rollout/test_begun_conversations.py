"""Conversations that are begun early: first turns are handed in, and all else is as it was."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.data.tokenizer import load_tokenizer
from luyen.rollout.conversation_config import ConversationConfig
from luyen.rollout.multi_turn import Conversations
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import Group
from luyen.rollout.tools.python_tools import tool, tool_class
from luyen.telemetry.journal import WorkJournal
from tests.character_tokenizer import CHATML, build_character_tokenizer
from tests.talk import KEEP, TOKENIZER, ScriptedEngine, call, converse, draws, setting

SAMPLING = Sampling(max_new_tokens=400, stop_ids=TOKENIZER.stop_ids)
HERE = {"seed": 0, "purpose": "rollout", "version": 3}
REFUSES = "{%- if 'no' in messages[0].content -%}{{ raise_exception('no') }}{%- endif -%}" + CHATML


@tool
async def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def asks_then_answers(text: str, key: int) -> str:
    if "<tool_response>" not in text:
        return call("add", a=key % 9, b=2) + "<|im_end|>"
    return text.rpartition("<tool_response>")[2].partition("<")[0] + "<|im_end|>"


def says_at_once(*_: Any) -> str:
    return "3<|im_end|>"


@contextmanager
def talking(how: ConversationConfig) -> Iterator[Conversations]:
    talks = Conversations(how, KEEP)
    try:
        yield talks
    finally:
        talks.close()


def asked_for(engine: ScriptedEngine) -> list[int]:
    return [key for request in engine.requests for key in request.keys]


def timeless(groups: list[Group]) -> list[Group]:
    """The groups without how long anything took."""
    return [
        replace(
            group,
            rollouts=tuple(
                replace(
                    r,
                    calls=tuple(replace(made, seconds=0.0) for made in r.calls),
                    notes={**r.notes, "seconds": 0.0},
                )
                for r in group.rollouts
            ),
        )
        for group in groups
    ]


def test_first_turns_are_handed_in_and_no_pass_is_made_before_the_result_is_wanted():
    how, engine = setting([add]), ScriptedEngine(asks_then_answers)
    with talking(how) as talks:
        asked = talks.begin(engine, draws(how, *"1234", samples=3), SAMPLING, **HERE)
        assert (len(engine.requests), len(set(asked_for(engine))), engine.passes) == (4, 12, 0)
        texts = [TOKENIZER.decode(request.tokens) for request in engine.requests]
        assert [text.rpartition("user\n")[2] for text in texts] == [
            f"{n}\nassistant\n" for n in "1234"
        ]
        groups = asked()
    assert len(asked_for(engine)) == 24, "two turns each"
    assert {request.weights for request in engine.requests} == {3}
    assert engine.passes > 0
    assert [len(group.rollouts) for group in groups] == [3] * 4


def test_a_single_conversation_is_handed_in_as_well():
    how, engine = setting(), ScriptedEngine(says_at_once)
    with talking(how) as talks:
        talks.begin(engine, draws(how, "1+2="), SAMPLING, **HERE)
        assert (len(asked_for(engine)), engine.passes) == (1, 0)


def test_what_was_begun_gives_what_is_played():
    how = setting([add])
    wanted, script = draws(how, *"123456789", samples=2), asks_then_answers
    alone = converse(ScriptedEngine(script), how, wanted, SAMPLING, **HERE, policy=KEEP)
    played = asyncio.run(alone)
    with talking(how) as talks:
        begun = talks.begin(ScriptedEngine(script), wanted, SAMPLING, **HERE)()
    assert timeless(begun) == timeless(played)
    answers = {rollout.text for group in begun for rollout in group.rollouts}
    assert len(answers) > 1, "all of them say the same, and nothing was compared"


def test_the_result_may_be_asked_for_again():
    how, engine = setting([add]), ScriptedEngine(asks_then_answers)
    with talking(how) as talks:
        asked = talks.begin(engine, draws(how, "1", samples=2), SAMPLING, **HERE)
        first, drawn = asked(), len(engine.requests)
        assert asked() == first
        assert len(engine.requests) == drawn


def test_one_generation_may_be_begun_after_the_other():
    how, engine = setting([add]), ScriptedEngine(asks_then_answers)
    with talking(how) as talks:
        first = talks.begin(engine, draws(how, "1", "2"), SAMPLING, **HERE)()
        known = len(engine.requests)
        second = talks.begin(engine, draws(how, "3", "4"), SAMPLING, **HERE)
        assert [len(r.keys) for r in engine.requests[known:]] == [1, 1]
        groups = [*first, *second()]
    assert [group.prompt.messages[0]["content"] for group in groups] == list("1234")
    assert all(rollout.fault is None for group in groups for rollout in group.rollouts)


def watched(log: list[str]):
    """A tool that writes down what is opened, called and let go."""

    @tool_class(name="add")
    class Add:
        async def create(self) -> None:
            log.append("opened")

        async def call(self, a: int, b: int) -> str:
            """Add two numbers."""
            log.append("called")
            return str(a + b)

        async def release(self) -> None:
            log.append("released")

    return Add


def test_nothing_is_opened_before_somebody_wants_the_result():
    log: list[str] = []
    how, engine = setting([watched(log)]), ScriptedEngine(asks_then_answers)
    with talking(how) as talks:
        talks.begin(engine, draws(how, "1", "2", samples=2), SAMPLING, **HERE)
        assert (log, asked_for(engine)) == ([], [])
    assert log == []


def test_what_was_begun_and_never_wanted_is_taken_back():
    how, engine = setting([add]), ScriptedEngine(asks_then_answers)
    with talking(how) as talks:
        talks.begin(engine, draws(how, "1", "2", samples=2), SAMPLING, **HERE)
        assert len(asked_for(engine)) == 4
    assert engine.is_idle, "nobody draws what nobody waits for"
    assert engine.passes == 0


def test_sessions_of_what_was_begun_are_let_go_once():
    log: list[str] = []
    how, engine = setting([watched(log)]), ScriptedEngine(asks_then_answers)
    with talking(how) as talks:
        talks.begin(engine, draws(how, "1", samples=3), SAMPLING, **HERE)()
        done = sorted(log)
    assert done == sorted(log) == ["called"] * 3 + ["opened"] * 3 + ["released"] * 3


def test_what_is_wrong_with_a_prompt_is_told_to_who_wants_the_result(tmp_path: Path):
    build_character_tokenizer(tmp_path, chat_template=REFUSES)
    how, engine = setting(tokenizer=load_tokenizer(str(tmp_path))), ScriptedEngine(says_at_once)
    with talking(how) as talks:
        asked = talks.begin(engine, draws(how, "yes", "no"), SAMPLING, **HERE)
        with pytest.raises(UserError, match="refuses a conversation of user"):
            asked()
        assert engine.is_idle
        [group] = talks.begin(engine, draws(how, "yes"), SAMPLING, **HERE)()
        assert group.rollouts[0].text == "3"


def test_what_the_journal_has_is_not_handed_in(taken_up: Callable[[], WorkJournal]):
    how = setting([add])
    journal, engine = taken_up(), ScriptedEngine(asks_then_answers)
    with talking(how) as talks:
        [first] = talks.begin(
            engine, draws(how, "1", samples=2), SAMPLING, journal=journal, **HERE
        )()
    journal.close()
    drawn = set(asked_for(engine))
    journal, engine = taken_up(), ScriptedEngine(asks_then_answers)
    with talking(how) as talks:
        asked = talks.begin(
            engine, draws(how, "1", "2", samples=3), SAMPLING, journal=journal, **HERE
        )
        assert [len(request.keys) for request in engine.requests] == [1, 3]
        assert not drawn & set(asked_for(engine))
        again, _ = asked()
    journal.close()
    assert again.rollouts[:2] == first.rollouts
    assert [rollout.sample for rollout in again.rollouts] == [0, 1, 2]


def test_where_the_journal_has_everything_nothing_is_handed_in(
    taken_up: Callable[[], WorkJournal],
):
    how, found, engines = setting([add]), list[list[Group]](), list[ScriptedEngine]()
    for _ in range(2):
        journal, engine = taken_up(), ScriptedEngine(asks_then_answers)
        with talking(how) as talks:
            wanted = draws(how, "1", samples=2)
            found.append(talks.begin(engine, wanted, SAMPLING, journal=journal, **HERE)())
        journal.close()
        engines.append(engine)
    assert (found[0], engines[1].requests, engines[1].passes) == (found[1], [], 0)
    assert engines[0].requests
