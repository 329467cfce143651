"""Ranks that learn from given rows learn what one process does, and go on from its checkpoints.

Tolerances: metrics 1e-6, norms of gradients 1e-5 relative, weights after three steps 2e-5, where
they have moved by up to 3e-3. In bf16 gradients are rounded in other parts, which shows in the
second digit once weights have been rounded too; a weight may be off by its last bit.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import luyen.train.builders.ray
from luyen.config.check import check
from luyen.runtime.training import ModelsOnRanks
from luyen.train.offline.build import STAGES, make_offline_rank
from tests.unit.runtime.offline_job import CASES, SAVED_AT, STEPS, go_on, main, train
from tests.worlds import run_together


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest differences; relative for norms of gradients."""

    metric: float = 1e-6
    norm: float = 1e-5
    weight: float = 2e-5


EXACT = Tolerance()
FIRST_BF16 = Tolerance(metric=1e-3, norm=5e-3)
BF16 = Tolerance(metric=5e-2, norm=5e-2, weight=8e-3)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worlds")
    alone = {n: train(c, 0, 1, None, folder / "world_1" / n) for n, c in CASES.items()}
    torch.save(alone, folder / "results_1.pt")
    run_together(main, [(folder, rank) for rank in range(4)], folder, limit_s=600)
    return folder


def results(folder: Path, world: int) -> dict[str, Any]:
    return torch.load(folder / f"results_{world}.pt")


def demand_equal(found: dict[str, Any], wanted: dict[str, Any], near: Tolerance) -> None:
    assert len(found["steps"]) == len(wanted["steps"])
    for number, (mine, theirs) in enumerate(zip(found["steps"], wanted["steps"], strict=True)):
        is_first = number == 0 and near is BF16 and len(wanted["steps"]) == STEPS
        bars = FIRST_BF16 if is_first else near
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            slack = {"rel": bars.norm} if name == "norm" else {"abs": bars.metric, "rel": 1e-6}
            assert mine[name] == pytest.approx(value, **slack), (number, name)
    assert found["weights"].keys() == wanted["weights"].keys()
    assert found["first"] == wanted["first"]
    assert found["digests"].keys() == wanted["digests"].keys()
    for name, weight in wanted["weights"].items():
        assert found["weights"][name].dtype == weight.dtype
        torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=near.weight)


def tolerance(case: str) -> Tolerance:
    return BF16 if CASES[case].dtype == torch.bfloat16 else EXACT


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_learn_from_rows_what_one_process_learns(worlds: Path, world: int, case: str):
    wanted = results(worlds, 1)[case]
    assert wanted["steps"][0]["norm"] > 1e-3
    demand_equal(results(worlds, world)[case], wanted, tolerance(case))


@pytest.mark.parametrize("case", CASES)
def test_what_one_world_saves_another_continues(worlds: Path, case: str):
    """Four ranks continue one process, two continue four, one process continues two."""
    course = results(worlds, 1)[case]
    wanted = {**course, "steps": course["steps"][SAVED_AT:]}
    for world in (4, 2):
        demand_equal(results(worlds, world)[f"{case}, gone on"], wanted, tolerance(case))
    alone = go_on(CASES[case], 0, 1, None, worlds / "world_2" / case)
    demand_equal(alone, wanted, tolerance(case))


@pytest.mark.parametrize("is_offloaded", [True, False])
def test_the_optimizer_of_a_rank_is_where_its_engine_says(
    monkeypatch: pytest.MonkeyPatch, is_offloaded: bool
):
    """One GPU may train as a rank on Ray too: its weights are whole."""
    engine = ModelsOnRanks(lay_out=lambda _: None, offload=is_offloaded)
    monkeypatch.setattr(luyen.train.builders.ray, "join_engine", lambda *_: engine)
    returned: Any = lambda context: context  # noqa: E731
    monkeypatch.setitem(STAGES, "sft", replace(STAGES["sft"], worker=returned))
    rows = ("data.train_files=arithmetic://sum?traces=1", "trainer.stage=sft")
    context: Any = make_offline_rank(check([], rows).config, "cuda", 0, 1, "nowhere")
    assert context.offloads_optimizer == is_offloaded
