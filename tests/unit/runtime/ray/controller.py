"""A controller to be killed: it starts a cluster and a replica, says so, and waits for answers."""

from functools import partial

from luyen.rollout.protocol import Request, Sampling, generate
from luyen.runtime.ray.cluster import connect
from tests.unit.runtime.ray.broken import broken_engine


def main() -> None:
    connect("local", cpus=2, threads=1)
    from luyen.runtime.ray.actors import start_engines

    engines = start_engines(partial(broken_engine, how="idles"), replicas=1)
    [pid] = [member.facts.pid for member in engines.replica_pool.members if member.facts]
    print("ready", pid, flush=True)
    generate(
        engines, [Request(id="a", tokens=(1,), keys=(1,), sampling=Sampling(max_new_tokens=1))]
    )


if __name__ == "__main__":
    main()
