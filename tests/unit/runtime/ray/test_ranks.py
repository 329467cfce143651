"""Ranks that die, stop or break: the group ends, nobody waits, and the cause is what is told."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.config.schema.trainer import TimeoutsConfig
from luyen.runtime.ray.cluster import connect
from luyen.runtime.ray.messages import RanksLost, RemoteError
from tests.unit.runtime.ray.frail import Frail, frail
from tests.unit.runtime.ray.test_cluster import living

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
exceptions = pytest.importorskip("ray.exceptions", reason="the extra `ray` is not installed")
PEER = "[gloo/transport/tcp/pair.cc:538] Connection closed by peer [192.0.2.7]:29401"
SILENCE_S = 4.0
GONE_S = 30.0


@pytest.fixture(scope="module")
def group(cluster_address: str) -> Iterator[Callable[[], Any]]:
    """Starts two ranks."""
    connection = connect(cluster_address, threads=1)
    from luyen.runtime.ray.ranks import RankGroup

    timeouts = TimeoutsConfig(silence_s=SILENCE_S)
    yield lambda: RankGroup(frail, places=[{"num_cpus": 1}] * 2, timeouts=timeouts)
    connection.disconnect()


def demand_nobody(pids: set[int]) -> None:
    last = time.monotonic() + GONE_S
    while living(pids) and time.monotonic() < last:
        time.sleep(0.1)
    assert living(pids) == set()


def test_the_cause_is_told_and_not_who_lost_the_connection(group: Callable[[], Any]):
    """Rank 1 breaks; rank 0 hears that its peer is gone at nearly the same time."""
    ranks = group()
    assert ranks.all(Frail.added, 2.0) == [4.0, 4.0]
    with pytest.raises(RemoteError) as caught:
        ranks.all(Frail.wrong, 1)
    said = str(caught.value)
    assert said.startswith("rank 1 broke:")
    assert "ValueError: the plugin of a user is wrong" in said
    assert "frail.py" in said, "the remote traceback"
    demand_nobody(set(ranks.pids))


def test_every_thread_that_waits_for_ranks_hears_what_ended_them_first(group: Callable[[], Any]):
    """One waits for what breaks; the others for calls behind it, and hear of their end before."""
    ranks = group()
    breaks = ranks.begin_each(Frail.wrong, [1, 1])
    behind = [
        ranks.begin_all(Frail.weight_sums),
        ranks.gather(),
        ranks.begin_all(Frail.weight_sums),
    ]
    heard: dict[int, BaseException] = {}

    def hear(number: int, wait: Callable[[], Any]) -> None:
        with pytest.raises(RemoteError) as caught:
            wait()
        heard[number] = caught.value

    threads = [threading.Thread(target=hear, args=one) for one in enumerate(behind)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)  # by now the calls behind have failed
    hear(-1, breaks)
    for thread in threads:
        thread.join(GONE_S)
    assert set(heard) == {-1, 0, 1, 2}
    assert {str(error) for error in heard.values()} == {str(heard[-1])}
    assert "ValueError: the plugin of a user is wrong" in str(heard[-1])
    assert ranks.is_over
    demand_nobody(set(ranks.pids))


def test_ranks_publish_behind_what_they_were_called_for_without_being_told(
    group: Callable[[], Any],
):
    ranks = group()
    done, gathering = ranks.begin_each_and_gather(Frail.added, [1.0, 2.0])
    gathered = gathering()
    ((plain, names),) = ray.get(gathered.parts[0]).stretches
    assert (names, plain[2].view("float32").tolist()) == ((("w", (1,)),), [3.0])
    assert (gathered.bytes, gathered.digests) == (4, {"actor/w": "float32 [1] 0000000000000003"})
    assert done() == [3.0, 3.0]
    _, gathering = ranks.begin_each_and_gather(Frail.wrong, [1, 1])
    with pytest.raises(RemoteError, match="ValueError: the plugin of a user is wrong"):
        gathering()
    assert ranks.is_over
    with pytest.raises(RemoteError, match="ValueError: the plugin of a user is wrong"):
        ranks.all(Frail.added, 2.0)
    demand_nobody(set(ranks.pids))


def test_ranks_are_looked_after_while_others_take_what_they_have_published(
    group: Callable[[], Any],
):
    ranks = group()
    ranks.raise_if_lost()
    time.sleep(1.0)
    ranks.raise_if_lost()  # each has answered once
    os.kill(ranks.pids[1], signal.SIGSTOP)

    def look() -> None:
        for _ in range(60):
            ranks.raise_if_lost()
            time.sleep(0.5)

    with pytest.raises(RanksLost, match=r"rank 1 gave no sign of life for \d s"):
        look()
    with pytest.raises(RanksLost, match="rank 1 gave no sign of life"):
        ranks.gather()
    demand_nobody(set(ranks.pids))


def test_a_rank_that_is_stopped_is_lost_after_a_while(group: Callable[[], Any]):
    """Nobody hears of it: as on a node that is cut off."""
    ranks = group()
    ranks.raise_if_lost()
    time.sleep(1.0)
    ranks.raise_if_lost()  # each has answered once: a first answer may take longer
    with pytest.raises(RanksLost, match=r"rank 0 gave no sign of life for \d s"):
        ranks.all(Frail.stopped, 0)
    demand_nobody(set(ranks.pids))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "killed_later"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_dies_is_named_and_the_others_do_not_wait(
    group: Callable[[], Any], how: str, who: int
):
    ranks = group()
    with pytest.raises(RanksLost, match=f"rank {who} is gone: Worker unexpectedly exits"):
        ranks.all(getattr(Frail, how), who)
    demand_nobody(set(ranks.pids))


def task_error(cause: Exception) -> Exception:
    """As Ray hands on what was raised elsewhere."""
    try:
        raise cause
    except type(cause) as error:
        text = (
            f"\x1b[36mray::RankProcess\x1b[39m (pid=1)\n      ^^^^\n{type(error).__name__}: {error}"
        )
        return exceptions.RayTaskError("carry_out", text, error)


def test_what_errors_stand_for():
    from luyen.runtime.ray.health import (
        classify_failure,
        failure_reason,
        is_object_lost,
        is_secondary_error,
    )

    mendable = UserError("a.b", 1, f"it is wrong; {PEER}", "mend it")
    assert classify_failure(task_error(mendable), "rank 0") is mendable
    assert is_secondary_error(task_error(RuntimeError(PEER)))
    assert not is_secondary_error(task_error(mendable))
    assert not is_secondary_error(task_error(ValueError("no")))
    lost = classify_failure(task_error(RuntimeError(PEER)), "rank 1")
    assert isinstance(lost, RanksLost)
    assert "rank 1 lost the connection" in str(lost)
    assert PEER in str(lost)
    broken = classify_failure(task_error(ValueError("no")), "rank 1")
    assert str(broken) == "rank 1 broke:\nray::RankProcess (pid=1)\nValueError: no"
    assert is_object_lost(exceptions.OwnerDiedError("a" * 56, None, "ref"))
    gone = classify_failure(exceptions.ObjectLostError("a" * 56, None, "ref"), "rank 1")
    assert isinstance(gone, RanksLost), "what it had to say lay on its node"
    assert str(gone).startswith("rank 1 is gone, and with it what it had to say: ")
    memory = "\x1b[33mTask was killed due to the node running low on memory.\x1b[39m\nMemory: 1 GB"
    out = exceptions.OutOfMemoryError(memory)
    assert failure_reason(out) == "Task was killed due to the node running low on memory"
    assert str(classify_failure(out, "rank 2")).startswith("rank 2 is gone: Task was killed due to")
