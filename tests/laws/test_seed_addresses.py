"""Random numbers have addresses: no two places of a long run draw the same ones."""

from itertools import product

from luyen.base.records import GroupId
from luyen.base.seeds import derive_key, mix
from luyen.rollout.conversation_config import RolloutAddress
from luyen.rollout.single_turn import sampling_key

STEPS, DRAWS, SAMPLES, TURNS = 100, 32, 8, 4
PURPOSES = ("rollout", "greedy", "validation")


def test_no_two_turns_of_a_long_run_share_a_key():
    keys: set[int] = set()
    count = 0
    for purpose, step, draw in product(PURPOSES, range(STEPS), range(DRAWS)):
        # The same few prompts are drawn again and again, as small datasets make it happen.
        group = GroupId(step=step, draw=draw, uid=f"{draw % 5:016x}")
        for sample in range(SAMPLES):
            here = RolloutAddress(seed=0, purpose=purpose, group=group, sample=sample)
            keys.update(here.key(turn=turn) for turn in range(TURNS))
            count += TURNS
        keys.add(here.env_key)
        count += 1
    assert len(keys) == count


def test_a_single_turn_is_drawn_as_the_first_of_a_conversation():
    group = GroupId(step=3, draw=1, uid="a")
    here = RolloutAddress(seed=7, purpose="rollout", group=group, sample=2)
    assert here.key(turn=0) == sampling_key(7, "rollout", group, 2)


def test_positions_under_neighbouring_keys_do_not_overlap():
    """A counter that ran into the next key's numbers would repeat them one position later."""
    drawn = [mix(derive_key(0, "rollout", sample), at) for sample in range(64) for at in range(512)]
    assert len(set(drawn)) == len(drawn)


def test_seeds_and_places_are_told_apart_by_type_and_length():
    addresses = [(1, "a", 2, 3), (1, "a", 23), (12, "a", 3), (1, "a2", 3), (1, "a", "2", 3)]
    assert len({derive_key(seed, purpose, *rest) for seed, purpose, *rest in addresses}) == 5
