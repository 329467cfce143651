"""Conversations that nothing is learned from are compared as well: groups left out, baselines."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from luyen.base.errors import UserError
from luyen.rewards.scoring import ScoredGroup
from luyen.rollout.multi_turn import Conversations, FaultPolicy
from luyen.rollout.protocol import Sampling
from luyen.rollout.tools.python_tools import tool
from luyen.rollout.tools.registry import ToolRegistry
from luyen.runtime.generation import Generation, ReadyRollouts
from luyen.train.metrics import StepReport
from luyen.train.scoring import ScoredRollouts, _greedy_rewards, _valid_groups
from tests.talk import KEEP, TOKENIZER, ScriptedEngine, call, draws, setting

SAMPLING = Sampling(max_new_tokens=400, stop_ids=TOKENIZER.stop_ids)


@tool
async def broken(a: int) -> str:
    """Break."""
    raise RuntimeError(f"broken {a}")


def run_of(generation: Generation):
    """What of a run is asked here: four samples a group, and nothing broke yet."""
    rollout = SimpleNamespace(rollout=SimpleNamespace(n=4))
    config = SimpleNamespace(actor_rollout_ref=rollout)
    roles = SimpleNamespace(generation=generation)
    return SimpleNamespace(roles=roles, config=config, phase=nullcontext)


def half_broken(purpose: str, *, samples: int = 2):
    """Two groups that keep at least two samples; the first conversation of the first one breaks."""
    how = setting(box=ToolRegistry([broken], on_error="fault"))
    talks = Conversations(how, FaultPolicy(on_fault="keep_min", min_samples=2))
    count = iter(range(9))
    said = call("broken", a=1)
    engine = ScriptedEngine(
        lambda text, _: (said if "bad" in text and not next(count) else "3") + "<|im_end|>"
    )
    generation = Generation(renderer=how.renderer, seed=0, conversations=talks)
    asked = draws(how, "bad", "good", samples=samples)
    groups = generation.play(engine, asked, SAMPLING, purpose=purpose, version=3)
    talks.close()
    return run_of(generation), groups


def test_a_validation_keeps_what_is_sound_of_a_group_however_little_that_is():
    run, groups = half_broken("validation")
    kept, lost = _valid_groups(run, groups, "validation")
    assert [len(group.rollouts) for group in kept] == [1, 2]
    assert [r.fault is None for r in lost] == [False]


def test_a_baseline_that_broke_is_told_apart_from_the_samples_of_its_group():
    run, groups = half_broken("greedy", samples=1)
    kept, [rollout] = _valid_groups(run, groups, "greedy")
    assert [group.prompt for group in kept] == [groups[1].prompt]
    assert (rollout.group, rollout.sample) == (groups[0].rollouts[0].group, 4)


def test_the_sound_rollout_of_a_group_that_is_left_out_is_compared():
    run, groups = half_broken("rollout")
    kept, lost = _valid_groups(run, groups, "rollout")
    scored = [ScoredGroup(prompt=g.prompt, rollouts=g.rollouts, seconds=()) for g in kept]
    found = ScoredRollouts(groups=[], scored=scored, broken=lost, baselines={})
    all_rollouts = StepReport(run, found, SimpleNamespace()).all_rollouts
    assert len(all_rollouts) == 4
    assert sorted(r.fault is None for r in lost) == [False, True]
    assert [r.key for r in all_rollouts if "unchecked" in r.notes] == []


def test_damaged_tokens_of_a_baseline_stop_the_run():
    how = setting()
    talks = Conversations(how, KEEP)
    generation = Generation(renderer=how.renderer, seed=0, conversations=talks)
    engine = ScriptedEngine(lambda *_: "3<|im_end|>")
    [group] = generation.play(engine, draws(how, "q"), SAMPLING, purpose="greedy", version=3)
    talks.close()
    [rollout] = group.rollouts
    bad = replace(rollout, tokens=(9, *rollout.tokens[1:]))
    with pytest.raises(UserError, match="differ from re-tokenizing"):
        _greedy_rewards(run_of(generation), ReadyRollouts([replace(group, rollouts=(bad,))]))
