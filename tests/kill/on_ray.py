"""Runs on a cluster that are killed: controller, rank, replica or node, at points of each.

One cluster serves all runs; each connects to it, and what a killed controller leaves there goes.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from tests.forked_python import forked_executable
from tests.kill.cases import Case, Killing
from tests.kill.offline import OFFLINE, OFFLINE_POINTS, is_passed
from tests.kill.points import POINTS
from tests.kill.remote import FILE, OFFLINE_RANKS, RANKS, REMOTE
from tests.kill.zygote import Zygote
from tests.runs import ROLLOUT

Kill: TypeAlias = Callable[[Case, Path], object]
_TESTS = Path(__file__).parent.parent
PLUGINS = f"trainer.plugins=[{_TESTS / 'chatty_plugin.py'},{_TESTS / 'kill' / 'armed_plugin.py'}]"
WORDS = (PLUGINS, "trainer.n_gpus_per_node=2", f"{ROLLOUT}.data_parallel_size=2")
SMALL = (PLUGINS, "trainer.runtime=ray")
"""One rank and one replica: half as many processes begin."""
_STORE = {"object_store_memory": 80 << 20}
_QUICK = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
"""A lost node is noticed in seconds, not in half a minute."""
_ELSEWHERE = ("between two optimizer steps",)
"""Points that the controller does not come by: ranks do."""


def ray_cases(
    staleness: Sequence[int] = (0,),
    *,
    shape: str = "tool-calling",
    is_short: bool = False,
    is_small: bool = False,
) -> list[Case]:
    """Conversations with tools, or plain answers, and GRPO, killed everywhere; in short, once.

    Points of ranks and replicas are counted for two of each: a small run has none of them.
    """
    has_tools = shape == "tool-calling"
    remote = {} if is_small else REMOTE
    points = {
        name: point
        for name, point in {**POINTS, **remote}.items()
        if name not in _ELSEWHERE and (has_tools or not point.tools_only)
    }
    return [
        Case(shape=shape, algorithm="GRPO", point=name, call=call, staleness=ahead)
        for ahead in staleness
        for name, point in points.items()
        for call in (point.calls[-1:] if is_short else point.calls)
    ]


def ray_offline_cases(runs: Sequence[str] = tuple(OFFLINE)) -> list[Case]:
    """Kinds of offline runs with two ranks, of which the controller or a rank is killed."""
    points = {
        name: point for name, point in OFFLINE_POINTS.items() if name not in _ELSEWHERE
    } | OFFLINE_RANKS
    return [
        Case(shape="offline", algorithm=run, point=name, call=call)
        for run in runs
        for name, point in points.items()
        if is_passed(run, name)
        for call in point.calls
    ]


@contextmanager
def a_cluster(folder: Path, *, nodes: int, cpus: int) -> Generator[Any]:
    """A head without cores for us and some nodes; its processes look for a file in `folder`.

    It has files of its own, so that nobody who asks for the cluster of this machine gets this one.
    """
    Cluster = import_module("ray.cluster_utils").Cluster
    given = {FILE: str(folder / "armed.json"), "RAY_ADDRESS": ""}
    before = {name: os.environ.get(name) for name in given}
    os.environ[FILE] = given[FILE]  # before the cluster is there: its processes inherit it
    own = tempfile.mkdtemp(prefix="ray")  # names of sockets must be short
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": _QUICK, **_STORE}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "temp_dir": own})
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=cpus, **_STORE)
        yield cluster
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        cluster.shutdown()
        shutil.rmtree(own, ignore_errors=True)


def mend(cluster: Any, *, cpus: int) -> None:
    """A new node for each that was lost."""
    for node in list(cluster.worker_nodes):
        if not node.live_processes() or node.dead_processes():
            cluster.remove_node(node, allow_graceful=False)
            cluster.add_node(num_cpus=cpus, **_STORE)


@contextmanager
def on_ray(folder: Path, words: tuple[str, ...] = WORDS) -> Generator[Kill]:
    """A cluster, and what carries a case out there."""
    with forked_executable(), a_cluster(folder, nodes=1, cpus=4), Zygote() as zygote:
        killing = Killing(zygote, folder, words)
        yield lambda case, place: kill(killing, case, place)


def kill(killing: Killing, case: Case, place: Path) -> None:
    """Carry a case out, whoever it kills."""
    ranks = {**RANKS, **OFFLINE_RANKS}
    if case.point not in {**REMOTE, **ranks}:
        killing.carry_out(case, place)
        return
    said = killing.outlive(case, place)
    assert ("beginning again" in said) == (case.point in ranks), said
