"""Faults: one conversation breaks, its siblings do not, and a stated policy says what follows."""

import asyncio

import pytest

from luyen.base.errors import UserError
from luyen.base.records import CallStatus, StopReason
from luyen.rollout.build import tool_parsers
from luyen.rollout.env.protocol import GuardedEnv, Observation
from luyen.rollout.multi_turn import FaultPolicy, faulty_rollouts
from luyen.rollout.tools.python_tools import tool
from luyen.rollout.tools.rollout_tools import RolloutTools
from luyen.rollout.tools.validate import Validator
from luyen.rollout.transcript import Transcript
from tests.talk import ScriptedEngine, World, call, play, setting


@tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def asks_then_answers(text: str, _: int) -> str:
    return "3<|im_end|>" if "<tool_response>" in text else call("add", a=1, b=2) + "<|im_end|>"


def fails_once(real):
    """The real thing, except the first time."""
    count = 0

    def hit(*arguments, **named):
        nonlocal count
        count += 1
        if count == 1:
            raise ZeroDivisionError("injected")
        return real(*arguments, **named)

    return hit


BOUNDARIES = {
    "validate": (Validator, "fit"),
    "call": (RolloutTools, "call"),
    "result": (RolloutTools, "_succeeded"),
    "append": (Transcript, "answer"),
    "score": (RolloutTools, "score"),
}


@pytest.mark.parametrize("place", ["parse", *BOUNDARIES])
def test_a_fault_at_any_boundary_loses_no_sibling(place: str, monkeypatch: pytest.MonkeyPatch):
    """One conversation of four breaks here; the others end as they would, and it is counted."""
    parser = tool_parsers.get("hermes")
    how = setting([add], parser=fails_once(parser) if place == "parse" else parser)
    if place in BOUNDARIES:
        owner, name = BOUNDARIES[place]
        monkeypatch.setattr(owner, name, fails_once(getattr(owner, name)))
    [group] = play(ScriptedEngine(asks_then_answers), how, "1+2=", samples=4)
    faults = [r for r in group.rollouts if r.fault is not None]
    told = [c for r in group.rollouts for c in r.calls if c.status != CallStatus.OK]
    words = [r.fault for r in faults] + [c.error for c in told]
    assert len(words) == 1, "the fault is counted once"
    assert "injected" in words[0]
    sound = [r for r in group.rollouts if r.fault is None and not any(c.error for c in r.calls)]
    assert [(r.stop, r.text) for r in sound] == [(StopReason.ANSWERED, "3")] * 3
    assert faulty_rollouts([group], FaultPolicy(on_fault="keep_min")) == faults


@pytest.mark.parametrize("place", ["open", "act", "score", "close"])
def test_a_world_that_breaks_ends_its_own_conversation_only(place: str):
    class Breaks(World):
        pass

    async def explode(self, *_):
        raise RuntimeError(f"boom in {place}")

    def make(prompt):
        broken = prompt.messages[0]["content"] == "bad"
        world = Breaks() if broken else World()
        worlds.append(world)
        return world

    async def close(self):
        self.closed += 1
        if place == "close":
            raise RuntimeError("boom in close")

    Breaks.close = close
    if place != "close":
        setattr(Breaks, place, explode)
    worlds: list[World] = []
    engine = ScriptedEngine(lambda *_: "x<|im_end|>")
    bad, good = play(engine, setting(env=make), "bad", "good", samples=2)
    for rollout in bad.rollouts:
        assert rollout.stop == StopReason.FAULT
        assert f"boom in {place}" in rollout.fault
    assert all(r.fault is None and r.given for r in good.rollouts)
    assert [world.closed for world in worlds] == [1, 1, 1, 1]


def test_a_broken_conversation_is_played_again_and_draws_the_same_numbers():
    attempts: list[int] = []

    class Flaky(World):
        async def act(self, messages):
            attempts.append(1)
            if len(attempts) == 1:
                raise ConnectionError("no line")
            return await super().act(messages)

    engine = ScriptedEngine(lambda *_: "x<|im_end|>")
    policy = FaultPolicy(on_fault="retry", retries=2)
    [group] = play(engine, setting(env=lambda _: Flaky()), "q", policy=policy)
    [rollout] = group.rollouts
    assert rollout.fault is None
    assert rollout.notes["retries"] == 1.0
    assert engine.requests[0].keys == engine.requests[1].keys


def test_the_policy_for_faults_decides():
    class Breaks(World):
        async def act(self, messages):
            raise ConnectionError("no line")

    def make(prompt):
        return Breaks() if prompt.messages[0]["content"] == "bad" else World()

    groups = play(ScriptedEngine(lambda *_: "x<|im_end|>"), setting(env=make), "bad", "good")
    [broken] = faulty_rollouts(groups, FaultPolicy(on_fault="keep_min"))
    assert "ConnectionError: no line" in broken.fault
    with pytest.raises(UserError, match=r"1 of 2 conversations broke.*no line"):
        faulty_rollouts(groups, FaultPolicy(on_fault="fail"))
    with pytest.raises(UserError, match="1 of 1"):
        faulty_rollouts(groups[:1], FaultPolicy(on_fault="keep_min"))


def test_a_group_with_too_few_sound_rollouts_is_left_out_whole():
    count = 0

    class Sometimes(World):
        async def act(self, messages):
            nonlocal count
            count += 1
            if count == 1:
                raise ConnectionError("no line")
            return Observation(is_done=True)

    engine = ScriptedEngine(lambda *_: "x<|im_end|>")
    groups = play(engine, setting(env=lambda _: Sometimes()), "a", "b", samples=2)
    assert len(faulty_rollouts(groups, FaultPolicy(on_fault="keep_min", min_samples=1))) == 1
    assert len(faulty_rollouts(groups, FaultPolicy(on_fault="keep_min", min_samples=2))) == 2


def test_an_engine_that_fails_stops_everyone_with_its_error():
    class Failing(ScriptedEngine):
        def advance(self):
            raise UserError("weights", "nan", "not finite", "lower the rate")

    with pytest.raises(UserError, match="not finite"):
        play(Failing(lambda *_: "x"), setting(), "a", "b", samples=3)


def test_a_world_that_never_opens_is_a_fault():
    class Shut(World):
        async def open(self, prompt, key):
            await asyncio.sleep(60)

    engine = ScriptedEngine(lambda *_: "x<|im_end|>")
    [group] = play(engine, setting(env=lambda _: Shut(), budget_s=0.05), "q")
    [rollout] = group.rollouts
    assert (rollout.stop, rollout.tokens) == (StopReason.FAULT, ())
    assert "before its environment and tools had opened" in rollout.fault


@pytest.mark.parametrize(
    ("place", "given", "said"),
    [
        ("open", None, "World.open gave None"),
        ("act", None, "World.act gave None; it must give an Observation"),
        ("act", "more", "World.act gave a str"),
        (
            "act",
            Observation(messages=({"role": "user", "content": 5},)),
            "without a role or a text",
        ),
        ("act", Observation(messages=({"content": "more"},)), "without a role or a text"),
        ("score", float("nan"), "a reward is a finite number"),
    ],
)
def test_what_a_world_hands_over_is_checked(place: str, given: object, said: str):
    async def wrong(*_: object) -> object:
        return given

    world = World()
    setattr(world, place, wrong)
    engine = ScriptedEngine(lambda *_: "x<|im_end|>")
    [group] = play(engine, setting(env=lambda _: world), "q")
    assert said in group.rollouts[0].fault
    assert world.closed == 1


def test_a_world_that_breaks_twice_is_remembered_for_the_first_time():
    class Breaks(World):
        async def act(self, messages):
            raise ValueError("the reason")

        async def close(self):
            raise KeyError("the consequence")

    [group] = play(ScriptedEngine(lambda *_: "x<|im_end|>"), setting(env=lambda _: Breaks()), "q")
    assert "ValueError: the reason" in group.rollouts[0].fault


def test_a_world_that_never_judges_is_a_fault(monkeypatch: pytest.MonkeyPatch):
    class Slow(World):
        async def score(self):
            await asyncio.sleep(60)

    make = GuardedEnv.__init__
    monkeypatch.setattr(GuardedEnv, "__init__", lambda self, env, **_: make(self, env, end_s=0.05))
    [group] = play(ScriptedEngine(lambda *_: "x<|im_end|>"), setting(env=lambda _: Slow()), "q")
    assert "Slow.score took more than 0.05 s" in group.rollouts[0].fault


def test_a_world_may_not_speak_for_the_policy():
    class Puppeteer(World):
        async def act(self, messages):
            return Observation(messages=({"role": "assistant", "content": "I agree."},))

    engine = ScriptedEngine(lambda *_: "x<|im_end|>")
    [group] = play(engine, setting(env=lambda _: Puppeteer()), "q")
    assert "spoke as the assistant" in group.rollouts[0].fault


def test_a_world_that_opens_with_too_much_is_a_fault():
    class Wordy(World):
        async def open(self, prompt, key):
            return ({"role": "user", "content": "word " * 400},)

    engine = ScriptedEngine(lambda *_: "x<|im_end|>")
    bad = play(engine, setting(env=lambda _: Wordy()), "q")[0].rollouts[0]
    assert "tokens, at most 1000" in bad.fault


def test_a_fault_that_cannot_be_printed_is_a_fault_like_others():
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    class Breaks(World):
        async def act(self, messages):
            raise Mute

    [group] = play(ScriptedEngine(lambda *_: "x<|im_end|>"), setting(env=lambda _: Breaks()), "q")
    assert group.rollouts[0].fault.startswith("Mute: it cannot be printed")
