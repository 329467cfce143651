"""A controller to be killed: it starts a cluster and two ranks, says so, and waits."""

import time
from typing import Any

from luyen.runtime.ray.cluster import connect
from tests.unit.runtime.ray.frail import Frail, frail


def main() -> None:
    connect("local", cpus=2, threads=1)
    from luyen.runtime.ray.ranks import RankGroup

    make: Any = frail
    added: Any = Frail.added
    ranks = RankGroup(make, places=[{"num_cpus": 1}] * 2)
    assert ranks.all(added, 2.0) == [4.0, 4.0]
    print("ready", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
