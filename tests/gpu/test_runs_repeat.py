"""On a GPU, a run with the same seed leaves the same chain of digests, whatever it learns from."""

from pathlib import Path

import pytest

from luyen.base.digests import StepDigest, read_digests
from luyen.config.check import check
from luyen.train.start import run_training
from tests.runs import CHATTY, Ran, train

pytestmark = pytest.mark.gpu

RECIPES = Path(__file__).parent.parent.parent / "recipes"
KINDS = {
    "answers": (),
    "fp32": ("actor_rollout_ref.model.dtype=float32",),
    "conversations": CHATTY,
    "adapters": ("actor_rollout_ref.model.lora_rank=4",),
    "a critic": ("algorithm.adv_estimator=gae", "critic.optim.lr=1.0e-3"),
}


@pytest.fixture
def cuda(device: str) -> str:
    """CUDA, or no test."""
    if device != "cuda":
        pytest.skip("needs CUDA")
    return device


def run(folder: Path, kind: str) -> Ran:
    return train(folder, *KINDS[kind], "trainer.device=cuda", "trainer.total_training_steps=3")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_repeats(cuda: str, kind: str, tmp_path: Path):
    first, again = (run(tmp_path / name, kind) for name in ("first", "again"))
    lines, others = (read_digests(ran.root / "digests.jsonl") for ran in (first, again))
    assert len(lines) == 3
    for one, other in zip(lines, others, strict=True):
        assert one == other, f"step {one.step}"
    assert max(first.course("parity/max_gap")) == 0.0


@pytest.mark.parametrize("recipe", ["dpo", "kto", "simpo", "reward_model", "distill", "online_dpo"])
def test_a_recipe_repeats(cuda: str, recipe: str, tmp_path: Path):
    lines = [_chain(recipe, tmp_path / name) for name in ("first", "again")]
    assert len(lines[0]) > 6
    assert lines[0] == lines[1]


def _chain(recipe: str, folder: Path) -> list[StepDigest]:
    words = ["trainer.total_training_steps=8", "trainer.device=cuda", "trainer.logger=jsonl"]
    report = check([RECIPES / f"{recipe}.yaml"], [*words, f"trainer.default_local_dir={folder}"])
    assert report.is_sound, report.problems
    run_training(report)
    (file,) = folder.rglob("digests.jsonl")
    return list(read_digests(file))
