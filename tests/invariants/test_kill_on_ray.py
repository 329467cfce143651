"""Runs on a cluster: whoever is killed, the run goes on as if nothing had happened."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kill.cases import Case
from tests.kill.on_ray import Kill, on_ray, ray_cases, ray_offline_cases

pytest.importorskip("ray", reason="the extra `ray` is not installed")


@pytest.fixture(scope="module")
def kill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kill]:
    with on_ray(tmp_path_factory.mktemp("killed")) as kill:
        yield kill


@pytest.mark.slow
@pytest.mark.parametrize("case", [*ray_cases(), *ray_cases(shape="single-turn")], ids=str)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(case: Case, kill: Kill, tmp_path: Path):
    kill(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", ray_offline_cases(("sft", "KTO, precomputed", "distill")), ids=str)
def test_a_killed_run_on_rows_goes_on_as_if_nothing_had_happened(
    case: Case, kill: Kill, tmp_path: Path
):
    kill(case, tmp_path)
