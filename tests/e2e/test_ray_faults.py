"""Whole runs on three nodes: whatever is lost, the run goes on and does what it would have done."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from luyen.runtime.ray.cluster import connect
from tests.kill.cases import Case, Killing, log_of
from tests.kill.on_ray import PLUGINS, a_cluster, mend
from tests.kill.remote import Loss, stopped
from tests.kill.zygote import ROOT, Zygote
from tests.runs import ACTOR, ROLLOUT, TINY
from tests.unit.runtime.ray.test_cluster import living
from tests.unit.runtime.ray.test_ranks import demand_nobody

pytest.importorskip("ray", reason="the extra `ray` is not installed")
SPLIT = (
    PLUGINS,
    "trainer.n_gpus_per_node=2",
    f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.n_gpus_per_node=2",
)
AGAIN = "beginning again"


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Killing]]:
    """Three nodes of two cores: one for the ranks, one for the replicas, and one to spare."""
    folder = tmp_path_factory.mktemp("three")
    with a_cluster(folder, nodes=3, cpus=2) as cluster, Zygote() as zygote:
        yield cluster, Killing(zygote, folder, SPLIT)


def nodes_of(cluster: Any, kind: str) -> list[set[str]]:
    """For each run so far, the nodes on which its processes of a kind began."""
    connection = connect(cluster.address)
    try:
        actors = import_module("ray._private.state").actors().values()
    finally:
        connection.disconnect()
    found: dict[str, set[str]] = {}
    for actor in actors:
        if actor["ActorClassName"].startswith(kind):
            found.setdefault(actor["JobID"], set()).add(actor["Address"]["NodeID"])
    return [found[job] for job in sorted(found)]


def lose_a_node(
    three: tuple[Any, Killing], point: str, call: int, place: Path, *, loss: Loss = "node"
) -> str:
    cluster, killing = three
    mend(cluster, cpus=2)
    case = Case(shape="tool-calling", algorithm="GRPO", point=point, call=call)
    killing.outlive(case, place, loss=loss)
    return log_of(place)


@pytest.mark.slow
def test_a_node_lost_in_the_update_costs_time_and_nothing_else(
    three: tuple[Any, Killing], tmp_path: Path
):
    """Ranks and replicas lie apart, as configured; the node to spare takes the place of one."""
    assert AGAIN in lose_a_node(three, "a rank has made an optimizer step", 3, tmp_path)
    cluster, _ = three
    whole, lost, *_ = nodes_of(cluster, "RankProcess")
    [drawing] = nodes_of(cluster, "Replica")[0]
    assert len(whole) == 1
    assert drawing not in whole
    assert lost


@pytest.mark.slow
def test_what_broke_first_is_all_that_the_command_prints(
    three: tuple[Any, Killing], tmp_path: Path
):
    """A loss breaks on rank 1, and rank 0 loses the connection to it at the same moment."""
    mend(three[0], cpus=2)
    plugin = ROOT / "tests" / "kill" / "wrong_loss.py"
    config = tmp_path / "run.yaml"
    config.write_text("{}")
    words = [*TINY, "trainer.n_gpus_per_node=2", f"trainer.default_local_dir={tmp_path}"]
    words += [f"trainer.plugins=[{plugin}]", f"{ACTOR}.policy_loss.loss_mode=wrong_on_the_last"]
    command = [sys.executable, "-m", "luyen", "train", str(config), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    errors = done.stderr[done.stderr.index("error:") :]
    assert errors.startswith("error: rank 1 broke:\nray::RankProcess.carry_out_and_gather()")
    assert errors.rstrip().endswith("ValueError: this loss is wrong")
    assert "wrong_loss.py" in errors
    assert "Connection closed by peer" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "call", "is_begun_again"),
    [
        ("a replica draws", 20, False),
        ("a replica takes weights", 2, False),
        ("a replica confirms its weights", 2, False),
        ("a rank gathers weights for the replicas", 2, True),
        ("a rank has written its shards", 2, True),
    ],
)
def test_a_lost_node_changes_nothing(
    three: tuple[Any, Killing], tmp_path: Path, point: str, call: int, is_begun_again: bool
):
    assert (AGAIN in lose_a_node(three, point, call, tmp_path)) == is_begun_again


@pytest.mark.slow
def test_a_node_that_is_cut_off_is_given_up_and_leaves_nobody_when_it_is_back(
    three: tuple[Any, Killing], tmp_path: Path
):
    """All of its processes stop in the middle of an update, and answer nobody any more."""
    point = "a rank has made an optimizer step"
    assert AGAIN in lose_a_node(three, point, 3, tmp_path, loss="node cut off")
    there = stopped()
    assert len(there) > 2
    for pid in living(there):
        os.kill(pid, signal.SIGCONT)
    demand_nobody(there)
