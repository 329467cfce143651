"""Traces of every process of a cluster's run: ranks and replicas."""

from typing import final

from luyen.runtime.ahead import AheadGeneration
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.ranks import RankGroup
from luyen.runtime.trace import Trace


@final
class ClusterTraces:
    """Starts and stops traces in the processes of ranks and replicas.

    A replica that is lost meanwhile leaves no trace.
    """

    def __init__(
        self, ranks: RankGroup, engines: RayEngines, ahead: AheadGeneration | None
    ) -> None:
        """With `ahead` only its thread may touch the engines."""
        self._ranks = ranks
        self._engines = engines
        self._ahead = ahead

    def start_trace(self, trace: Trace) -> None:
        """Record what every rank and every replica computes from now on."""
        self._replicas("start_trace", trace)
        self._ranks.all("start_trace", trace)

    def stop_trace(self) -> None:
        """Write down what was recorded."""
        self._ranks.all("stop_trace")
        self._replicas("stop_trace")

    def _replicas(self, method: str, *arguments: Trace) -> None:
        def call() -> object:
            return self._engines.crew.ask_all(method, *arguments)

        if self._ahead is None:
            call()
        else:
            self._ahead.on_engine(call)
