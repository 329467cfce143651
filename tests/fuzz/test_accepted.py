"""What a check accepts, training begins: seeded configurations of every stage, one process.

The first numbers run with every test; 3,000 of them are the long sweep.
"""

from pathlib import Path

import pytest

from luyen.config.fields import all_fields
from tests.fuzz.accepted import STAGES, case
from tests.fuzz.first_steps import run_cases
from tests.fuzz.values import all_values


def test_every_key_has_values_and_no_others_are_listed() -> None:
    values = all_values()
    assert values.keys() == all_fields().keys()
    assert [key for key, some in values.items() if not some] == ["trainer.default_local_dir"]
    alone = {key for key, some in values.items() if some == ("null",)}
    # Another program, and files that every case would have to put elsewhere.
    programs_and_files = {
        "actor_rollout_ref.rollout.server.python",
        "reward.cache.path",
        "trainer.profile.save_path",
    }
    assert alone == programs_and_files


def test_cases_differ_and_cover_every_stage_and_most_keys() -> None:
    cases = [case(number) for number in range(600)]
    assert len({one.words for one in cases}) > 0.95 * len(cases)
    changed = {word.partition("=")[0] for one in cases for word in one.words}
    assert len(changed & all_fields().keys()) > 0.9 * len(all_fields())
    chosen = {word for one in cases for word in one.words if word.startswith("trainer.stage=")}
    assert {f"trainer.stage={stage}" for stage in STAGES} <= chosen


def test_200_accepted_configurations_take_their_first_step(tmp_path: Path) -> None:
    found = run_cases(200, tmp_path)
    assert found.tried > 250, "a check refuses some"
    assert found.wrong == ()


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 100_000, 200_000])
def test_1000_more_take_their_first_step(first: int, tmp_path: Path) -> None:
    found = run_cases(1000, tmp_path, first=first)
    assert found.wrong == ()
