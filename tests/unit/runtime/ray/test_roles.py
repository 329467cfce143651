"""What replicas are asked ahead is drawn once, and nobody gets the answers of another question."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from luyen.base.records import GroupId, Rollout, make_prompt
from luyen.data.render import Renderer
from luyen.data.tokenizer import load_tokenizer
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import PromptRequest
from luyen.runtime.generation import Generation
from luyen.runtime.monitoring import RoleMonitor
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.roles import ray_roles
from luyen.runtime.roles import Roles
from luyen.runtime.weights import GatheredWeights
from tests.unit.runtime.ray.fakes import FakeReplica, Fleet

RENDERER = Renderer(load_tokenizer("builtin://arithmetic"))
DIGEST = "float32 [1] 0000000000000001"
SAMPLING = Sampling(max_new_tokens=3)


class Ranks:
    """Ranks whose weights never change."""

    count = 2

    def __init__(self) -> None:
        self.watch = RoleMonitor()

    def gather(self, form: str | None = None) -> Callable[[], GatheredWeights]:
        found = GatheredWeights(
            parts=[(("w", DIGEST),)], bytes=4, seconds=0.0, digests={"actor/w": DIGEST}
        )
        return lambda: found

    def raise_if_lost(self) -> None:
        """They live."""

    def stop(self) -> None:
        """Nothing to end."""


class Busy(Fleet):
    """Replicas that finish an answer as soon as they may draw it."""

    def __call__(self, index: int) -> FakeReplica:
        replica = super().__call__(index)
        submit = replica.on_submit
        replica.on_submit = lambda *what: (submit(*what), replica.finish(99))
        return replica


class Journal:
    """Knows some rollouts."""

    def __init__(self, known: Sequence[tuple[str, Rollout]] = ()) -> None:
        self.kept = {(purpose, r.group, r.sample): r for purpose, r in known}

    @property
    def has_known(self) -> bool:
        return bool(self.kept)

    def rollout(self, purpose: str, group: GroupId, sample: int) -> Rollout | None:
        return self.kept.get((purpose, group, sample))

    def keep_rollout(self, purpose: str, rollout: Rollout) -> None:
        self.kept[purpose, rollout.group, rollout.sample] = rollout


def roles_of(fleet: Fleet | None = None, *, frees_cache: bool = False) -> Roles:
    parts: Any = {"ranks": Ranks(), "micro_batching": None, "frees_cache": frees_cache}
    engines = RayEngines(fleet or Busy(), replicas=2)
    roles = ray_roles(engines=engines, generation=Generation(renderer=RENDERER, seed=7), **parts)
    roles.publish(0).wait()
    return roles


def draws(count: int = 3) -> list[PromptRequest]:
    prompts = [make_prompt([{"role": "user", "content": f"{i}+1="}]) for i in range(count)]
    return [
        PromptRequest(group=GroupId(step=2, draw=i, uid=prompt.uid), prompt=prompt, samples=2)
        for i, prompt in enumerate(prompts)
    ]


def asked(roles: Roles, purpose: str, journal: Journal | None = None) -> Any:
    kept: Any = journal
    return roles.submit(draws(), SAMPLING, purpose=purpose, version=0, journal=kept)


def alone(purpose: str) -> Any:
    return asked(roles_of(), purpose).result()


@pytest.mark.parametrize("first", ["rollout", "greedy"])
def test_two_questions_about_the_same_prompts_get_their_own_answers(first: str):
    roles = roles_of()
    both = {purpose: asked(roles, purpose) for purpose in ("rollout", "greedy")}
    assert alone("rollout") != alone("greedy")
    for purpose in (first, *(both.keys() - {first})):
        assert both[purpose].result() == alone(purpose)


def test_a_question_whose_answers_are_all_known_does_not_take_those_of_the_next():
    known = [("rollout", r) for group in alone("rollout") for r in group.rollouts]
    roles, journal = roles_of(), Journal(known)
    drawn, greedy = asked(roles, "rollout", journal), asked(roles, "greedy", journal)
    assert drawn.result() == alone("rollout")
    assert greedy.result() == alone("greedy")
    assert len(journal.kept) == 12


def test_what_is_submitted_is_on_its_way_at_once_and_waits_for_its_weights():
    fleet = Fleet()
    roles = roles_of(fleet)
    pending = asked(roles, "rollout")
    assert not pending.done()
    assert sum(len(replica.open) for replica in fleet.begun) == 6
    for replica in fleet.begun:
        replica.finish(99)
    assert pending.result() == alone("rollout")


@pytest.mark.parametrize("frees_cache", [True, False])
def test_replicas_free_their_cache_after_each_generation_where_told_to(frees_cache: bool):
    fleet = Busy()
    roles = roles_of(fleet, frees_cache=frees_cache)
    for purpose in ("rollout", "greedy"):
        assert asked(roles, purpose).result() == alone(purpose)
    rests = [[c[0] for c in replica.calls].count("rest") for replica in fleet.begun]
    assert rests == [2 * frees_cache] * 2
