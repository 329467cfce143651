"""What ranks hold, as digests; new weights go to the replicas on the way."""

from collections.abc import Mapping
from functools import cached_property
from typing import final

from luyen.engine.shard_sums import merged
from luyen.runtime.ray.publisher import OnTheWay, Publisher
from luyen.runtime.ray.ranks import RankGroup


@final
class DescribedByRanks:
    """Digests that ranks make of their shards, after all that they were called for before."""

    def __init__(self, ranks: RankGroup, publisher: Publisher, coming: OnTheWay | None) -> None:
        """`coming` are the weights, on their way to the replicas; None: they stay."""
        self._ranks = ranks
        self._publisher = publisher
        self._coming = coming
        self._sums = None if coming is not None else ranks.begin_all("weight_sums")

    def weights(self) -> Mapping[str, str]:
        """Parameters that learn, and their masters where they have any."""
        return self._weights

    @cached_property
    def _weights(self) -> Mapping[str, str]:
        coming, self._coming = self._coming, None  # what was sent is kept by who needs it
        if coming is not None:
            return self._publisher.send(coming)
        assert self._sums is not None
        return merged(self._sums())

    def moments(self) -> Mapping[str, str]:
        """First moments of the optimizers. Replicas that load weights go first."""
        self._publisher.wait()
        return merged(self._ranks.all("moment_sums"))
