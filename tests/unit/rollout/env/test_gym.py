"""Riddles of reasoning-gym: the row's own or one from a seed, judged by the package."""

import asyncio
import random

import pytest

from luyen.base.errors import UserError
from luyen.base.records import StopReason, make_prompt
from luyen.config.task_sources import parse_task_url
from luyen.data.sources import reasoning_gym_rows
from luyen.rollout.build import envs
from tests.talk import ScriptedEngine, play, setting

reasoning_gym = pytest.importorskip("reasoning_gym", reason="the extra `tasks` is missing")
from luyen.data import reasoning_gym_adapter  # noqa: E402

LEGS = "leg_counting"
EMPTY = make_prompt([{"role": "system", "content": "Answer."}])


def world(**kwargs):
    return envs.get("reasoning_gym")(**kwargs)


def row():
    """What a row of the package's own source carries."""
    [made] = reasoning_gym_rows(parse_task_url(f"reasoning_gym://{LEGS}?size=1&seed=3"))
    return made["extra_info"], made["reward_model"]["ground_truth"]


def rollout(world_of, line, **extra):
    engine = ScriptedEngine(lambda text, _: f"{line(text)}<|im_end|>")
    [group] = play(engine, setting(env=world_of), "How many?", **extra)
    return group.rollouts[0]


def test_an_entry_of_the_row_is_judged_by_the_verifier_of_its_dataset():
    extra, truth = row()
    right = rollout(lambda _: world(), lambda _: f"<answer>{truth}</answer>", **extra)
    wrong = rollout(lambda _: world(), lambda _: "7", **extra)
    assert (right.stop, right.given) == (StopReason.ENVIRONMENT_DONE, ((0, 1.0),))
    entry = extra["reasoning_gym"]["entry"]
    assert wrong.given == ((0, reasoning_gym.get_score_answer_fn(LEGS)("7", entry)),)
    assert len(wrong.messages) == 1


def test_feedback_follows_a_wrong_answer_while_attempts_are_left():
    extra, truth = row()

    def line(text: str) -> str:
        return str(truth) if "No!" in text else "7"

    second = rollout(lambda _: world(attempts=3, feedback="No!"), line, **extra)
    assert [m["content"] for m in second.messages] == ["7", "No!", str(truth)]
    assert second.given == ((1, 1.0),)
    never = rollout(lambda _: world(attempts=3, feedback="No!"), lambda _: "7", **extra)
    assert [m["content"] for m in never.messages] == ["7", "No!", "7", "No!", "7"]


def test_a_riddle_is_made_from_the_key_and_asked_by_the_user():
    async def asked(key: int, prompt=EMPTY):
        return tuple(await world(dataset=LEGS).open(prompt, key))

    before = random.getstate()
    first, again, other = (asyncio.run(asked(key)) for key in (2**63 + 5, 2**63 + 5, 6))
    assert first == again != other
    assert [m["role"] for m in first] == ["system", "user"]
    assert random.getstate() == before
    shared = make_prompt(EMPTY.messages, extra_info={"seed": 4})
    assert asyncio.run(asked(1, shared)) == asyncio.run(asked(2, shared)), "a group shares it"


def test_the_settings_of_a_dataset_reach_it_and_its_own_verifier_judges():
    async def talk():
        made = world(dataset=LEGS, config={"min_animals": 9, "max_animals": 9})
        await made.open(EMPTY, key=1)
        answer = str(made._task.entry["answer"])
        done = await made.act([{"role": "assistant", "content": answer}])
        return made._task.entry, done, await made.score()

    entry, done, score = asyncio.run(talk())
    assert entry["metadata"]["difficulty"]["num_animals"] == (9, 9)
    assert (done.is_done, score) == (True, 1.0)


def test_no_whole_answer_is_judged_as_none():
    extra, _ = row()
    engine = ScriptedEngine(lambda *_: "1234567")
    [group] = play(engine, setting(env=lambda _: world(), room=3), "How many?", **extra)
    entry = extra["reasoning_gym"]["entry"]
    expected = reasoning_gym.get_score_answer_fn(LEGS)(None, entry)
    assert group.rollouts[0].stop == StopReason.TOKEN_BUDGET
    assert group.rollouts[0].given == ((0, expected),)


@pytest.mark.parametrize("gives", [ZeroDivisionError("boom"), float("nan"), "much"])
def test_a_verifier_that_breaks_is_a_fault_and_never_zero(gives, monkeypatch):
    def judge(answer, entry):
        if isinstance(gives, Exception):
            raise gives
        return gives

    monkeypatch.setattr(reasoning_gym_adapter, "verifier", lambda _: judge)
    extra, _ = row()
    broken = rollout(lambda _: world(), lambda _: "7", **extra)
    assert (broken.stop, broken.given) == (StopReason.FAULT, ())
    said = "boom" if isinstance(gives, Exception) else "a reward is a finite number"
    assert said in broken.fault


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({}, "no dataset is set"),
        ({"dataset": "leg_countin"}, "reasoning-gym has none"),
        ({"dataset": LEGS, "config": {"min_animals": -1}}, "refuses its settings"),
        ({"dataset": LEGS, "config": {"animals": 1}}, "refuses its settings"),
        ({"dataset": LEGS, "attempts": 0}, "no answer would be allowed"),
    ],
)
def test_wrong_settings_are_said(kwargs, said: str):
    with pytest.raises(UserError, match=said):
        asyncio.run(world(**kwargs).open(EMPTY, key=0))
