"""Points inside the processes of a cluster, and the file that says which of them is to be fatal.

Workers inherit the name of the file from the cluster. Whoever dies removes it first: one process
dies, once, and those that are begun again live.
"""

import json
import os
import signal
from importlib import import_module
from pathlib import Path
from typing import Literal, TypeAlias

from tests.kill.points import Point, arm, kill_self

FILE = "LUYEN_TEST_ARMED"
Loss: TypeAlias = Literal["process", "node", "node cut off"]
"""What is lost with the process that comes by."""
RANKS: dict[str, Point] = {
    "a rank is about to update": Point(
        where="luyen.runtime.worker:TrainWorker.update_actor", when="before", calls=(1, 4)
    ),
    "a rank has made an optimizer step": Point(
        where="luyen.engine.optim:MasterOptimizer.step", when="after", calls=(1, 3, 6)
    ),
    "a rank is about to write its shards": Point(
        where="luyen.checkpoint.dcp:ShardWriter.write_data", when="before", calls=(1, 3)
    ),
    "a rank has written its shards": Point(
        where="luyen.checkpoint.dcp:ShardWriter.write_data", when="after", calls=(2,)
    ),
    "a rank gathers weights for the replicas": Point(
        where="luyen.engine.sharded_state:full_weights", when="before", calls=(1, 2)
    ),
    "a rank has gathered weights for the replicas": Point(
        where="luyen.runtime.ray.ranks:pack", when="after", calls=(3,)
    ),
}  # fmt: skip
REPLICAS: dict[str, Point] = {
    "a replica generates": Point(
        where="luyen.runtime.ray.replica:EngineThread._advance", when="before", calls=(2, 40)
    ),
    "a replica takes weights": Point(
        where="luyen.runtime.ray.replica:load_part", when="before", calls=(1, 2)
    ),
    "a replica confirms its weights": Point(
        where="luyen.runtime.weights:_described", when="before", calls=(2,)
    ),
}  # fmt: skip
REMOTE = {**RANKS, **REPLICAS}
_KEPT = (
    "a rank has made an optimizer step",
    "a rank is about to write its shards",
    "a rank has written its shards",
)
OFFLINE_RANKS: dict[str, Point] = {name: RANKS[name] for name in _KEPT} | {
    "a rank is about to update on rows": Point(
        where="luyen.runtime.offline:OfflineWorker.update", when="before", calls=(1, 4)
    ),
    "a rank scores rows": Point(
        where="luyen.runtime.offline:OfflineWorker.scores", when="after", calls=(1, 2)
    ),
}
"""Points of the ranks of an offline stage."""


def load(point: str, call: int, *, loss: Loss = "process") -> None:
    """Let a process of the cluster be lost at a point, alone or with its node.

    Of the ranks it is the first at odd calls and the last at even ones; of the replicas, any.
    """
    Path(os.environ[FILE]).write_text(json.dumps({"point": point, "call": call, "loss": loss}))


def is_loaded() -> bool:
    """Whether somebody is still to die."""
    return Path(os.environ[FILE]).exists()


def arm_as_told() -> None:
    """What every process of the cluster does: arm itself, if there is a file."""
    file = Path(os.environ.get(FILE, ""))
    if not file.is_file():
        return
    told = json.loads(file.read_text())

    def die() -> None:
        if not _is_meant(last=told["call"] % 2 == 0):
            return
        try:
            file.unlink()
        except FileNotFoundError:  # somebody was faster
            return
        if told["loss"] == "node cut off":
            cut_off()
            return
        if told["loss"] == "node":
            # The parent of a worker is what makes its node one.
            os.kill(os.getppid(), signal.SIGKILL)
        kill_self()

    arm({**REMOTE, **OFFLINE_RANKS}[told["point"]], told["call"], die=die)


def cut_off() -> None:
    """Stop every process of this node: it is there and answers nobody. `stopped` names them."""
    node = os.getppid()
    children = Path(f"/proc/{node}/task").glob("*/children")
    others = {int(pid) for file in children for pid in file.read_text().split()} - {os.getpid()}
    pids = [node, *others, os.getpid()]
    Path(f"{os.environ[FILE]}.stopped").write_text(json.dumps(pids))
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def stopped() -> set[int]:
    """Who was stopped with a node that was cut off."""
    return set(json.loads(Path(f"{os.environ[FILE]}.stopped").read_text()))


def _is_meant(*, last: bool) -> bool:
    ranks = import_module("torch.distributed")
    return not ranks.is_initialized() or last == (ranks.get_rank() == ranks.get_world_size() - 1)
