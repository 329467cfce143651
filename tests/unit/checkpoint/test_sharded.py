"""What ranks save together loads in any other number of ranks, and in one process, bit by bit."""

import json
from pathlib import Path

import pytest

from luyen.checkpoint.tensors import load_state
from tests.unit.checkpoint import sharded_job
from tests.worlds import run_together

WORLDS = (4, 2, 1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one process without a group (`world_0`) and of every world, loaded by all."""
    root = tmp_path_factory.mktemp("worlds")
    sharded_job.save(root / "world_0", sharded_job.trained(0, 2, None), is_first=True)
    ranks = [(root, world, rank, [0, *WORLDS]) for world in WORLDS for rank in range(world)]
    run_together(sharded_job.main, ranks, root, limit_s=150)
    return root


@pytest.mark.parametrize("world", [0, *WORLDS])
def test_one_process_loads_what_any_world_saved(saved: Path, world: int):
    folder = saved / f"world_{world}"
    expected = sharded_job.expected(folder)
    assert sharded_job.flat(load_state(folder, "state")) == expected
    into = sharded_job.trained(9, 1, None)
    assert sharded_job.flat(load_state(folder, "state", into=into)) == expected


@pytest.mark.parametrize("world", WORLDS)
def test_each_rank_wrote_a_share_and_tied_weights_are_stored_once(saved: Path, world: int):
    folder = saved / f"world_{world}" / "state"
    assert len(list(folder.glob("rank_*.safetensors"))) == world
    index = json.loads((folder / "index.json").read_text())
    assert index["aliases"] == {"weights/head.weight": "weights/embed.weight"}
    rows = [sizes[0] for _, sizes, _, _ in index["tensors"]["weights/embed.weight"]["boxes"]]
    shares = {4: [2, 2, 1], 2: [3, 2], 1: [5]}
    assert [count for count in rows if count] == shares[world]
    tied = load_state(folder.parent, "state")["weights"]
    assert tied["head.weight"].data_ptr() == tied["embed.weight"].data_ptr()


def test_nothing_is_pickled(saved: Path):
    for file in saved.glob("world_*/state/*"):
        assert file.suffix in (".json", ".safetensors"), file
