"""Sharded training is the training of one process: recorded steps, saved and gone on with.

Twenty steps of PPO, six and fewer of the rest; with twenty of them the rest is slow.

Tolerances: losses 1e-6 absolute, norms of gradients 1e-5 relative, scores and values 5e-5, weights
after the last step 2e-5, where they have moved by up to 2e-2. What is left comes from the order of
sums, which AdamW may enlarge where a gradient is next to nothing.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine.fsdp_cases import SUITES
from tests.unit.engine.fsdp_job import Ranks, go_on, main, train
from tests.worlds import run_together

LOSSES = ("actor/pg_loss", "actor/kl_loss", "critic/vf_loss")


def run_worlds(folder: Path, suite: str, limit_s: int) -> Path:
    """Worlds of 4 and of 2 ranks, after one process has trained and saved the same cases."""
    alone = {n: train(c, Ranks(), None, folder / "world_1" / n) for n, c in SUITES[suite].items()}
    torch.save(alone, folder / "results_1.pt")
    run_together(main, [(folder, rank, suite) for rank in range(4)], folder, limit_s=limit_s)
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_worlds(tmp_path_factory.mktemp("worlds"), "quick", 400)


def results(folder: Path, world: int) -> dict[str, Any]:
    return torch.load(folder / f"results_{world}.pt")


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest differences between ranks and one process; relative for norms of gradients."""

    loss: float = 1e-6
    norm: float = 1e-5
    metric: float = 1e-5
    score: float = 5e-5
    weight: float = 2e-5


GLOO = Tolerance()
BF16 = Tolerance(loss=5e-3, norm=1e-2, metric=2e-2, score=5e-2, weight=2e-2)
"""Where gradients are rounded to bf16 in other parts than by one process."""


def demand_equal(
    found: dict[str, Any], wanted: dict[str, Any], tolerance: Tolerance = GLOO
) -> None:
    for step, (mine, theirs) in enumerate(zip(found["steps"], wanted["steps"], strict=True)):
        assert mine.keys() == theirs.keys()
        for name, stream in theirs.items():
            if isinstance(stream, torch.Tensor):
                torch.testing.assert_close(mine[name], stream, rtol=0, atol=tolerance.score)
            else:
                demand_metrics(mine[name], stream, tolerance, f"step {step}")
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, weight in wanted["weights"].items():
        assert found["weights"][name].dtype == weight.dtype
        torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=tolerance.weight)


def demand_metrics(
    mine: dict[str, float], theirs: dict[str, float], tolerance: Tolerance, where: str
) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        if name == "norm":
            assert mine[name] == pytest.approx(value, rel=tolerance.norm), where
        elif name in LOSSES:
            assert mine[name] == pytest.approx(value, rel=0, abs=tolerance.loss), where
        else:
            near = pytest.approx(value, rel=tolerance.metric, abs=tolerance.metric)
            assert mine[name] == near, (where, name)


@pytest.mark.parametrize("case", SUITES["quick"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_learn_what_one_process_learns(quick: Path, world: int, case: str):
    demand_equal(results(quick, world)[case], results(quick, 1)[case])


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_worlds(tmp_path_factory.mktemp("divided"), "sequences", 400)


@pytest.mark.parametrize("case", SUITES["sequences"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_divide_sequences_learn_what_one_process_learns(
    divided: Path, world: int, case: str
):
    """Two or four ranks share every pass, also where they are more than the heads of keys."""
    is_rounded = SUITES["sequences"][case].dtype == torch.bfloat16
    found, wanted = (results(divided, ranks)[case] for ranks in (world, 1))
    demand_equal(found, wanted, BF16 if is_rounded else GLOO)


@pytest.mark.parametrize("case", [n for n, c in SUITES["quick"].items() if c.saved_at])
def test_what_one_world_saves_another_goes_on_with(quick: Path, case: str):
    """Four ranks go on from one process, two from four, one process from two and from four."""
    course = results(quick, 1)[case]
    wanted = {**course, "steps": course["steps"][SUITES["quick"][case].saved_at :]}
    for world in (2, 4):
        demand_equal(results(quick, world)[f"{case}, gone on"], wanted)
        folder = quick / f"world_{world}" / case
        demand_equal(go_on(SUITES["quick"][case], Ranks(), None, folder), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["long", "losses", "matrix", "replicated"])
def test_more_models_ways_to_cut_a_step_and_copies(tmp_path: Path, suite: str):
    run_worlds(tmp_path, suite, 1800)
    for world in (2, 4):
        found = results(tmp_path, world)
        assert found.keys() == SUITES[suite].keys()
        for case, course in found.items():
            demand_equal(course, results(tmp_path, 1)[case])
