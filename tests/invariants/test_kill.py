"""A run that is killed anywhere goes on as if nothing had happened, tools included."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kill.cases import (
    Case,
    Killing,
    all_cases,
    offline_cases,
    quick_cases,
    quick_offline_cases,
)
from tests.kill.zygote import Zygote

QUICK = [*quick_cases(), *quick_offline_cases()]
REST = [case for case in [*all_cases(), *offline_cases()] if case not in QUICK]


@pytest.fixture(scope="module")
def killing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killing]:
    with Zygote() as zygote:
        yield Killing(zygote, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    case: Case, killing: Killing, tmp_path: Path
):
    killing.carry_out(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", REST, ids=str)
def test_the_whole_matrix(case: Case, killing: Killing, tmp_path: Path):
    killing.carry_out(case, tmp_path)
