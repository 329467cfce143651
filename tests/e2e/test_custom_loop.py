"""The example of an own loop over role handles."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parent.parent.parent / "examples" / "custom_loop.py"


def rewards_of(folder: Path, *words: str) -> list[float]:
    spec = importlib.util.spec_from_file_location("custom_loop", FILE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    short = ("trainer.total_training_steps=2", f"trainer.default_local_dir={folder}")
    return example.main([*example.DEFAULTS, *short, *words])


def test_it_is_short():
    assert len(FILE.read_text().splitlines()) <= 120


def test_it_trains_in_this_process(tmp_path: Path):
    found = rewards_of(tmp_path)
    assert len(found) == 2
    assert all(0.0 <= reward <= 1.0 for reward in found)


@pytest.mark.slow
def test_it_trains_on_ray_with_the_same_first_step(tmp_path: Path):
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    here = rewards_of(tmp_path / "here")
    there = rewards_of(
        tmp_path / "there",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.data_parallel_size=2",
    )
    assert there[0] == here[0]
