"""Digests of what ranks hold, each rank's parts added up."""

from collections.abc import Mapping
from functools import cached_property
from typing import final

from luyen.engine.shard_sums import merged
from luyen.runtime.ray.ranks import RankGroup


@final
class DescribedByRanks:
    """Digests that ranks compute of their shards, after all that they were called for before."""

    def __init__(self, ranks: RankGroup, published: Mapping[str, str] | None) -> None:
        """`published` are the digests of the weights, where a publication has gathered them."""
        self._ranks = ranks
        self._published = published

    def weights(self) -> Mapping[str, str]:
        """Parameters that learn, and their masters where they have any."""
        return self._weights

    @cached_property
    def _weights(self) -> Mapping[str, str]:
        return self._published or merged(self._ranks.all("weight_sums"))

    def moments(self) -> Mapping[str, str]:
        """First moments of the optimizers."""
        return merged(self._ranks.all("moment_sums"))
