"""Samplers of users: what goes wrong in them is said by name, and rows stay as they are."""

import asyncio
import sys

import numpy as np
import pytest

from luyen.base.errors import UserError
from luyen.base.records import make_prompt
from luyen.data.samplers import AdaptiveSampler, Sampler
from luyen.data.samplers.custom import load_sampler_class, make_sampler


def rows(count: int = 3):
    return [make_prompt([{"role": "user", "content": str(i)}]) for i in range(count)]


def sampler(take, **more):
    """A sampler of the user's whose `take` does this."""
    kind = type("Mine", (), {"__init__": lambda self, prompts, *, seed: None, "take": take, **more})
    return make_sampler(kind, "Mine", rows(), seed=0)


def raising(fault):
    def take(self, cursor, count):
        raise fault

    return take


@pytest.mark.parametrize(
    "fault",
    [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), KeyError("x")],
)
def test_what_take_raises_is_an_error_with_the_name_of_the_sampler(fault):
    made = sampler(raising(fault))
    with pytest.raises(UserError, match=rf"take\(5, 2\) failed: {type(fault).__name__}") as caught:
        made.take(5, 2)
    assert caught.value.value == "Mine"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([0], "gave 1 rows"),
        ([0, 1, 2], "gave 3 rows"),
        ([0, 3], "gave row 3, and there are 3"),
        ([0, -1], "gave row -1"),
        ([0, 0.5], "a row is a whole number"),
        (["0", "1"], "a row is a whole number"),
        (None, "TypeError"),
        (7, "TypeError"),
    ],
)
def test_what_is_no_row_is_refused(given, said):
    with pytest.raises(UserError, match=said):
        sampler(lambda self, cursor, count: given).take(0, 2)


def test_rows_of_numpy_and_generators_are_taken():
    assert sampler(lambda s, cursor, count: np.arange(count)).take(0, 3) == [0, 1, 2]
    assert sampler(lambda s, cursor, count: (i % 3 for i in range(count))).take(0, 2) == [0, 1]


def test_rows_that_a_sampler_changes_are_copies():
    ours = rows()

    class Changes:
        def __init__(self, prompts, *, seed):
            for prompt in prompts:
                prompt.extra_info["level"] = 3
            prompts[0].messages[0]["content"] = prompts[1:][0].messages[0]["content"] = "?"
            assert len(prompts) == 3

        def take(self, cursor, count):
            return [0] * count

    assert make_sampler(Changes, "Changes", ours, seed=0).take(0, 1) == [0]
    assert ours == rows()


def test_one_that_learns_keeps_its_state_and_its_faults_have_a_name():
    class Learns:
        state = (0, 0)

        def __init__(self, prompts, *, seed):
            pass

        def take(self, cursor, count):
            return [self.state[0]] * count

        def record(self, cursor, success):
            if success > 1:
                sys.exit(0)
            self.state = (1, np.int64(cursor))

    made = make_sampler(Learns, "Learns", rows(), seed=0)
    assert isinstance(made, AdaptiveSampler)
    made.record(4, 0.5)
    assert made.state == (1, 4)
    assert made.take(0, 2) == [1, 1]
    made.state = (2, 0)
    assert made.take(0, 1) == [2]
    with pytest.raises(UserError, match="record failed: SystemExit: 0"):
        made.record(0, 2.0)
    assert not isinstance(sampler(raising(ValueError())), AdaptiveSampler)
    assert isinstance(sampler(raising(ValueError())), Sampler)


def test_a_file_or_a_class_that_leaves_is_an_error(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(UserError, match="importing it failed: SystemExit: 0"):
        load_sampler_class(str(file), "Mine")
    leaves = type("Mine", (), {"__init__": lambda *_, **__: sys.exit(0)})
    with pytest.raises(UserError, match="making it failed: SystemExit: 0"):
        make_sampler(leaves, "Mine", rows(), seed=0)
