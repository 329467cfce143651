"""Several worlds in one run: every row gets its own, whatever the others are."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.base.records import GroupId, StopReason, make_prompt
from luyen.config.schema.actor_rollout_ref import EnvironmentConfig
from luyen.rollout.build import EnvSelector, envs
from luyen.rollout.env.protocol import Observation
from luyen.rollout.multi_turn import Conversations
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import PromptRequest
from tests.optional import needs
from tests.talk import KEEP, TOKENIZER, ScriptedEngine, World, call, play, setting

FILE = str(Path(__file__).with_name("worlds_of_classes.py"))
CHOICES: Mapping[str, EnvironmentConfig] = {
    "count": EnvironmentConfig(kind="class", kwargs={"path": FILE, "name": "Counter"}),
    "legs": EnvironmentConfig(
        kind="reasoning_gym", kwargs={"dataset": "leg_counting", "attempts": 2, "feedback": "No!"}
    ),
    "clerk": EnvironmentConfig(kind="user", kwargs={"replies": ["And now?"]}),
}
WORLDS = EnvSelector(CHOICES, default="clerk")


def draw(number: int, text: str, **row) -> PromptRequest:
    prompt = make_prompt([{"role": "user", "content": text}], extra_info=row)
    offered = make_prompt(
        prompt.messages,
        tools=[tool.schema for tool in WORLDS.tools_of(prompt)],
        extra_info=row,
    )
    group = GroupId(step=0, draw=number, uid=offered.uid)
    return PromptRequest(group=group, prompt=offered, samples=2)


def script(text: str, _: int) -> str:
    asks = "Count to" in text and "<tool_response>" not in text
    return (call("add", by=3) if asks else "3") + "<|im_end|>"


@needs("reasoning_gym")
def test_rows_of_one_batch_are_played_in_the_world_that_each_names():
    draws = [
        draw(0, "Go.", environment="count"),
        draw(1, "Legs?", environment="legs", seed=1),
        draw(2, "Hello."),
    ]
    assert {choice.kind for choice in CHOICES.values()} <= set(envs)
    assert [len(d.prompt.tools) for d in draws] == [2, 0, 0]
    talks = Conversations(setting(env=WORLDS.make), KEEP)
    sampling = Sampling(max_new_tokens=400, stop_ids=TOKENIZER.stop_ids)
    try:
        groups = talks.begin(
            ScriptedEngine(script), draws, sampling, seed=0, purpose="rollout", version=0
        )()
    finally:
        talks.close()
    assert {r.stop for g in groups for r in g.rollouts} == {StopReason.ENVIRONMENT_DONE}
    count, legs, clerk = [g.rollouts[0] for g in groups]
    assert ([c.result for c in count.calls], count.given) == (["3"], ((1, 1.0),))
    assert [m["content"] for m in legs.messages] == ["3", "No!", "3"]
    assert [value for _, value in legs.given] != [], "the verifier judged it"
    assert [m["content"] for m in clerk.messages] == ["3", "And now?", "3"]
    assert clerk.given == ()


def test_a_world_that_the_run_does_not_have_is_said():
    with pytest.raises(UserError, match="does not have"):
        WORLDS.make(make_prompt([], extra_info={"environment": "leg"}))


@pytest.mark.parametrize(
    ("kind", "kwargs", "said"),
    [
        ("class", {"path": FILE}, "needs `name`"),
        ("reasoning_gym", {"datset": "leg_counting"}, "takes no such argument"),
        ("verifiers", {}, "needs `id`"),
        ("interaction", {}, "needs `class_name`"),
        ("task", {}, "no environment of this name"),
    ],
)
def test_arguments_of_a_kind_are_checked_before_anything_runs(kind: str, kwargs, said: str):
    with pytest.raises(UserError, match=said):
        EnvSelector({"it": EnvironmentConfig(kind=kind, kwargs=kwargs)}, default=None)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({}, "must return messages"), ({"is_done": True, "reward": float("inf")}, "finite number")],
)
def test_an_observation_that_says_nothing_or_no_number_is_a_fault(wrong, said: str):
    class Odd(World):
        async def act(self, messages):
            return Observation(**wrong)

    made = Odd()
    engine = ScriptedEngine(lambda *_: "3<|im_end|>")
    [group] = play(engine, setting(env=lambda _: made), "Hello.")
    assert group.rollouts[0].stop == StopReason.FAULT
    assert said in group.rollouts[0].fault
    assert made.closed == 1
