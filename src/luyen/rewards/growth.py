"""Grows the trees that a configuration describes: one for each route, with shared sources."""

from collections.abc import Mapping, Sequence
from typing import final

from luyen.base.errors import UserError
from luyen.config.reward_parts import nodes, read_components, read_routes
from luyen.config.schema.reward import Component
from luyen.config.schema.reward import Reward as RewardConfig
from luyen.rewards.cache import Remembering, ScoreCache
from luyen.rewards.calls import Executor
from luyen.rewards.compose import ROOT
from luyen.rewards.counts import Counts
from luyen.rewards.custom import CustomReward
from luyen.rewards.judge import Judges
from luyen.rewards.leaves import Leaves
from luyen.rewards.node import Node, below
from luyen.rewards.pool import Pool
from luyen.rewards.protocol import Reward, Services, StepReward, StepWide
from luyen.rewards.routing import Routed, routes_in_force
from luyen.rewards.running import RunningMoments
from luyen.rewards.stand_ins import StandIns
from luyen.rewards.tree import Tree


@final
class TreeBuilder:
    """Builds what the configuration judges by, and remembers what it built."""

    def __init__(
        self,
        reward: RewardConfig,
        *,
        pool: Pool,
        services: Services,
        cache: ScoreCache | None,
        counts: Counts,
        max_response_length: int,
        require: Sequence[str] = (),
    ) -> None:
        components, wrong = read_components(reward)
        if wrong:
            raise UserError("reward.components", reward.components, wrong[0], "mend the component")
        self._reward = reward
        self._pool = pool
        self._services = services
        self._cache = cache
        self._counts = counts
        self._judges = Judges(own=services.ask, executor=pool, cache=cache, counts=counts)
        self._max_response_length = max_response_length
        self._require = require
        self._routes = routes_in_force(read_routes(reward), components)
        self.running = {p: node for p, node in nodes(components) if node.normalise == "running"}
        """The nodes that are normalised over time, by path."""
        self.moments = RunningMoments(list(self.running))
        """What was seen of them."""
        self.routed: list[Routed] = []

    def build(self, executor: Executor) -> Reward:
        """The custom function, or the routes, with calls made by this executor."""
        custom_reward_function = self._reward.custom_reward_function
        if custom_reward_function.path is not None:
            return CustomReward(
                custom_reward_function.path,
                custom_reward_function.name,
                custom_reward_function.reward_kwargs,
                executor=executor,
            )
        leaves = Leaves(
            executor=self._remembering(executor),
            isolated=self._remembering(self._pool),
            judges=self._judges,
            model=self._services.model,
            max_response_length=self._max_response_length,
            require=self._require,
        )
        routed = Routed(self._routes, build=lambda parts: self._tree(parts, leaves))
        self.routed.append(routed)
        return StepWide(routed, routed.judge) if self._is_step_wide() else routed

    def _tree(self, components: Mapping[str, Component], leaves: Leaves) -> Tree:
        combine = self._reward.combine
        waves, order = below("", components, combine, leaves)
        root = Node(path=ROOT, component=Component(combine=combine), waves=waves, order=order)
        return Tree(root, moments=self.moments, num_workers=self._reward.num_workers)

    def _remembering(self, executor: Executor) -> Executor:
        settled = StandIns(executor, self._counts)
        return settled if self._cache is None else Remembering(settled, self._cache)

    def _is_step_wide(self) -> bool:
        """Whether some route is judged by a learned reward that wants to see whole steps."""
        used = (node for r in self._routes for _, node in nodes(r.components))
        is_used = any(node.model is not None for node in used)
        return is_used and isinstance(self._services.model, StepReward)
