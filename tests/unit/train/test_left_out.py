"""Conversations that nothing is learned from are compared as well: groups left out, baselines."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from luyen.base.errors import UserError
from luyen.rollout.fault_policy import FaultPolicy
from luyen.rollout.multi_turn import Conversations
from luyen.rollout.protocol import Sampling
from luyen.rollout.tools.box import ToolBox
from luyen.rollout.tools.function import tool
from luyen.runtime.generation import Generation
from luyen.runtime.pending import Known
from luyen.train.groups import _greedy_rewards, _sound
from luyen.train.report import Told
from tests.talk import KEEP, TOKENIZER, ScriptedEngine, call, draws, setting

SAMPLING = Sampling(max_new_tokens=400, stop_ids=TOKENIZER.stop_ids)


@tool
async def broken(a: int) -> str:
    """Break."""
    raise RuntimeError(f"broken {a}")


def test_the_sound_rollout_of_a_group_that_is_left_out_is_compared():
    how = setting(box=ToolBox([broken], on_error="fault"))
    talks = Conversations(how, FaultPolicy(on_fault="keep_min", min_samples=2))
    count = iter(range(9))
    said = call("broken", a=1)
    engine = ScriptedEngine(
        lambda text, _: (said if "bad" in text and not next(count) else "3") + "<|im_end|>"
    )
    generation = Generation(renderer=how.renderer, seed=0, conversations=talks)
    asked = draws(how, "bad", "good", samples=2)
    groups = generation.play(engine, asked, SAMPLING, purpose="rollout", version=3)
    talks.close()
    roles = SimpleNamespace(generation=generation, broken=generation.broken)
    run = SimpleNamespace(roles=roles, broken=[], judged=[])
    run.judged = _sound(run, groups)
    everyone = Told(run, [], SimpleNamespace()).everyone
    assert len(everyone) == 4
    assert sorted(r.fault is None for r in run.broken) == [False, True]
    assert [r.key for r in everyone if "unchecked" in r.notes] == []


def test_damaged_tokens_of_a_baseline_stop_the_run():
    how = setting()
    talks = Conversations(how, KEEP)
    generation = Generation(renderer=how.renderer, seed=0, conversations=talks)
    engine = ScriptedEngine(lambda *_: "3<|im_end|>")
    [group] = generation.play(engine, draws(how, "q"), SAMPLING, purpose="greedy", version=3)
    talks.close()
    [rollout] = group.rollouts
    bad = replace(rollout, tokens=(9, *rollout.tokens[1:]))
    run = SimpleNamespace(
        roles=SimpleNamespace(generation=generation, broken=generation.broken), phase=nullcontext
    )
    with pytest.raises(UserError, match="differ from a rendering"):
        _greedy_rewards(run, Known([replace(group, rollouts=(bad,))]))
