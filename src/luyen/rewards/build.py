"""From the `reward` block to the reward of a run: routes by data source, and a tree for each."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self, final

from luyen.base.boundary import run_with_daemon_threads
from luyen.base.errors import UserError
from luyen.base.input_files import expanded
from luyen.base.records import Prompt, Rollout, Score
from luyen.config.reward_components import nodes, read_components, read_routes
from luyen.config.schema.reward import ComponentConfig, RewardConfig
from luyen.rewards import reward_managers
from luyen.rewards.cache import FILE, CachedExecutor, ScoreCache
from luyen.rewards.calls import Executor, FallbackExecutor, ScoringCounters
from luyen.rewards.custom import CustomReward
from luyen.rewards.leaf import LeafFactory
from luyen.rewards.llm_judge.judge_reward import JudgeFactory
from luyen.rewards.pool import ScoringPool
from luyen.rewards.protocol import Group, Reward, Services, StepReward, StepWide
from luyen.rewards.reward_managers import ManagerContext, managed
from luyen.rewards.running_stats import RunningMoments
from luyen.rewards.scoring import (
    VALIDATION,
    ScoredGroup,
    ScoreJournal,
    Tolerance,
    apply_fault_policy,
    score_all,
)
from luyen.rewards.tree import ROOT, Node, RewardTree, below, plainly, shape, together

# Routing: the data source of a row selects its components; there is no default route.

BUILT_IN: Mapping[str, str] = {
    "arithmetic": "exact",
    "arithmetic/*": "exact",
    "tools/*": "exact",
    "openai/gsm8k": "gsm8k",
    "reasoning_gym/*": "reasoning_gym",
    "math*": "math",
    "*/MATH*": "math",
    "aime*": "math",
    "*IFEval*": "ifeval",
    "ifeval*": "ifeval",
}
"""Pattern of a data source -> its default rule, if the configuration names none."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Components for the data sources that match a pattern.

    Example:
        >>> route = Route(pattern="math*", components={"math": ComponentConfig(rule="math")})
        >>> route.matches("math_dapo"), route.matches("MATH")
        (True, False)
    """

    pattern: str
    """`*` stands for anything, `?` for one letter; capitals matter."""
    components: Mapping[str, ComponentConfig]
    """Name in the tree -> its node."""

    def matches(self, source: str) -> bool:
        """Whether rows of this source take the route."""
        return fnmatchcase(source, self.pattern)


def routes_in_force(
    routes: Mapping[str, Sequence[str]], components: Mapping[str, ComponentConfig]
) -> list[Route]:
    """The routes in force, in the order in which they are tried."""
    if components and not routes:
        return [Route(pattern="*", components=components)]
    own = [
        Route(
            pattern=pattern,
            components={n: components.get(n) or ComponentConfig(rule=n) for n in names},
        )
        for pattern, names in routes.items()
    ]
    built_in = [
        Route(pattern=pattern, components={rule: ComponentConfig(rule=rule)})
        for pattern, rule in BUILT_IN.items()
    ]
    return own + built_in


@final
class RoutedReward:
    """Scores each group by the first route that its data source matches."""

    def __init__(
        self,
        routes: Sequence[Route],
        *,
        build: Callable[[Mapping[str, ComponentConfig]], RewardTree],
    ) -> None:
        """`build` makes a tree of components; a route is built when a row first takes it."""
        self._routes = tuple(routes)
        self._build = build
        self._built: dict[str, RewardTree] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the components of all routes."""
        return tuple(dict.fromkeys(name for route in self._routes for name in route.components))

    async def __call__(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        """One tree per rollout."""
        return await self._tree(prompt.data_source)(prompt, rollouts)

    async def score_groups(self, groups: Sequence[Group]) -> list[list[Score]]:
        """One tree per rollout of every group, in order; each route sees its groups at once."""
        taken: dict[RewardTree, list[int]] = {}
        for index, (prompt, _) in enumerate(groups):
            taken.setdefault(self._tree(prompt.data_source), []).append(index)
        columns = await together(
            [t.score_groups([groups[i] for i in own]) for t, own in taken.items()]
        )
        found: dict[int, list[Score]] = {}
        for own, rows in zip(taken.values(), columns, strict=True):
            found |= zip(own, rows, strict=True)
        return [found[index] for index in range(len(groups))]

    def check_sources(self, sources: Iterable[str]) -> None:
        """Build the tree of every source; a UserError lists all sources without a route."""
        names = dict.fromkeys(sources)
        lost = [s for s in names if not any(route.matches(s) for route in self._routes)]
        if lost:
            raise self._no_reward(lost)
        for source in names:
            self._tree(source)

    def _tree(self, source: str) -> RewardTree:
        route = next((route for route in self._routes if route.matches(source)), None)
        if route is None:
            raise self._no_reward([source])
        if route.pattern not in self._built:
            self._built[route.pattern] = self._build(route.components)
        return self._built[route.pattern]

    def _no_reward(self, sources: Sequence[str]) -> UserError:
        """The error about sources without a route; rows without the column have the source ''."""
        more = "reward.components or reward.custom_reward_function.path"
        if not any(sources):
            why = "rows lack the column data.reward_fn_key, and no reward is set for all rows"
            fix = f"set {more}, for instance reward.components.answer.rule=exact, or add the column"
            return UserError("data_source", None, why, fix)
        patterns = ", ".join(route.pattern for route in self._routes)
        why = f"no reward judges rows of this source (routes: {patterns})"
        named = next(source for source in sources if source)
        fix = (
            f"set reward.routes={{{named!r}: [RULE]}}, {more}; data.reward_fn_key names the column"
        )
        return UserError("data_source", ", ".join(sources), why, fix)


# Builds the reward trees of a configuration: one per route, with shared reward sources.


@final
class TreeBuilder:
    """Builds the rewards of a configuration once, and reuses them."""

    def __init__(
        self,
        reward: RewardConfig,
        *,
        pool: ScoringPool,
        services: Services,
        cache: ScoreCache | None,
        counts: ScoringCounters,
        max_response_length: int,
        require: Sequence[str] = (),
    ) -> None:
        components, wrong = read_components(reward)
        if wrong:
            raise UserError(
                "reward.components", reward.components, wrong[0], "correct the component"
            )
        self._reward = reward
        self._pool = pool
        self._services = services
        self._cache = cache
        self._counts = counts
        self._judges = JudgeFactory(own=services.ask, executor=pool, cache=cache, counts=counts)
        self._max_response_length = max_response_length
        self._require = require
        self._routes = routes_in_force(read_routes(reward), components)
        self.running = {p: node for p, node in nodes(components) if node.normalise == "running"}
        """The nodes that are normalised over time, by path."""
        self.moments = RunningMoments(list(self.running))
        """What was seen of them."""
        self.routed: list[RoutedReward] = []

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
        leaves = LeafFactory(
            executor=self._with_cache(executor),
            isolated=self._with_cache(self._pool),
            judges=self._judges,
            model=self._services.model,
            max_response_length=self._max_response_length,
            require=self._require,
        )
        routed = RoutedReward(self._routes, build=lambda parts: self._tree(parts, leaves))
        self.routed.append(routed)
        return StepWide(routed, routed.score_groups) if self._is_step_wide() else routed

    def _tree(self, components: Mapping[str, ComponentConfig], leaves: LeafFactory) -> RewardTree:
        combine = self._reward.combine
        waves, order = below("", components, combine, leaves)
        root = Node(path=ROOT, component=ComponentConfig(combine=combine), waves=waves, order=order)
        return RewardTree(root, moments=self.moments, num_workers=self._reward.num_workers)

    def _with_cache(self, executor: Executor) -> Executor:
        with_fallback = FallbackExecutor(executor, self._counts)
        return with_fallback if self._cache is None else CachedExecutor(with_fallback, self._cache)

    def _is_step_wide(self) -> bool:
        """Whether some route is scored by a learned reward that wants to see whole steps."""
        used = (node for r in self._routes for _, node in nodes(r.components))
        is_used = any(node.model is not None for node in used)
        return is_used and isinstance(self._services.model, StepReward)


# Running normalisation: the values of a step that it counts, read from the score trees.


def values_to_normalise(
    scored: Sequence[ScoredGroup], running: Mapping[str, ComponentConfig]
) -> dict[str, list[float]]:
    """Every value of each of these nodes as it was before normalising; what was gated is left out.

    A journal keeps trees, so a step that was taken up again counts the same values.
    """
    found: dict[str, list[float]] = {path: [] for path in running}
    roots = [score for group in scored for score in group.scores]
    for path, component in running.items():
        nodes = [part_at(root, path) for root in roots]
        for node in nodes:
            if node is not None and not node.gated and node.value is not None:
                judged = node.value if node.raw is None else node.raw
                found[path].append(shape(component, judged))
    return found


def part_at(root: Score, path: str) -> Score | None:
    """The part of a tree at a path below its root.

    A manager may have nested the whole tree next to a component of its own, as `score`.

    Example:
        >>> brief = Score(name="brief", value=0.5)
        >>> style = Score(name="style", value=0.5, parts=(brief,))
        >>> part_at(Score(name="reward", value=0.5, parts=(style,)), "style/brief") is brief
        True
    """
    found: Score | None = root
    for name in path.split("/"):
        parts = {part.name: part for part in found.parts} if found is not None else {}
        moved = parts.get("score") if found is root and name not in parts else None
        if moved is not None:
            parts = {part.name: part for part in moved.parts}
        found = parts.get(name)
    return found


MANAGERS = reward_managers
"""Importing it registers the managers that come with the package."""


def build_reward(
    reward: RewardConfig,
    *,
    max_response_length: int,
    services: Services | None = None,
    folder: Path | None = None,
    require: Sequence[str] = (),
) -> "BuiltReward":
    """The reward that a block describes. Close it at the end, or use it in a `with`.

    `folder` is the run directory, where a cache without a path of its own is kept; without one it
    lives in memory. `require` are promises of the sandbox (`sandbox.require`) without which no
    program is run.
    """
    memory = None if reward.memory_mb is None else reward.memory_mb * 2**20
    pool = ScoringPool(size=_processes(reward), timeout_s=reward.timeout_s, memory_bytes=memory)
    counts = ScoringCounters()
    cache = _cache(reward, folder, counts)
    builder = TreeBuilder(
        reward,
        pool=pool,
        services=services or Services(),
        cache=cache,
        counts=counts,
        max_response_length=max_response_length,
        require=require,
    )
    given = ManagerContext(
        reward=reward, max_response_length=max_response_length, pool=pool, build=builder.build
    )
    return BuiltReward(
        managed(reward.reward_manager.name, given),
        reward=reward,
        pool=pool,
        builder=builder,
        cache=cache,
        counts=counts,
        closing=services.closing if services is not None else None,
    )


def _processes(reward: RewardConfig) -> int:
    """Rules compute, so more processes than cores only cost memory; your own code may wait."""
    is_own = reward.custom_reward_function.path is not None
    return reward.num_workers if is_own else min(reward.num_workers, os.cpu_count() or 1)


def _cache(reward: RewardConfig, folder: Path | None, counts: ScoringCounters) -> ScoreCache | None:
    if not reward.cache.enable:
        return None
    if reward.cache.path is not None:
        return ScoreCache(expanded(reward.cache.path), counts=counts)
    return ScoreCache(None if folder is None else folder / FILE, counts=counts)


@final
class BuiltReward:
    """The reward of a run: what its manager made, with the processes and the policy for faults."""

    def __init__(
        self,
        inner: Reward,
        *,
        reward: RewardConfig,
        pool: ScoringPool,
        builder: TreeBuilder,
        cache: ScoreCache | None,
        counts: ScoringCounters,
        closing: Callable[[], None] | None,
    ) -> None:
        self._inner = inner
        self._closing = closing
        self._pool = pool
        self._builder = builder
        self._cache = cache
        self._counts = counts
        self._num_workers = reward.num_workers
        self._tolerance = Tolerance(
            on_fault=reward.on_fault,
            share=reward.max_fault_share,
            outside_share=reward.max_outside_share,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Components that a score may hold, as far as they are known beforehand."""
        return self._inner.names

    @property
    def pids(self) -> list[int]:
        """Ids of the processes it has started."""
        return self._pool.pids

    def score(self, groups: Sequence[Group], work: ScoreJournal | None = None) -> list[ScoredGroup]:
        """Every group with its scores, in order; those that the journal has are not scored again.

        A validation is scored without normalising, so that its numbers can be compared over time.
        """
        is_validation = work is not None and work.purpose == VALIDATION
        with plainly(is_validation):
            scored = score_all(self._inner, groups, num_workers=self._num_workers, work=work)
            return run_with_daemon_threads(scored)

    def advance(self, scored: Sequence[ScoredGroup]) -> None:
        """Count the values of a step that is done towards running normalisation.

        Call it once for each step, with all that was scored in it, wherever the scores came from:
        the values are read from the trees. The next step is normalised by what was counted so far.
        """
        if self._builder.running:
            self._builder.moments.add(values_to_normalise(scored, self._builder.running))

    def state(self) -> dict[str, Any]:
        """What a resumed run must know, as JSON can hold it."""
        return {"running": self._builder.moments.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; an empty mapping is the initial state."""
        self._builder.moments.restore(state.get("running", {}))

    def take_counts(self) -> dict[str, float]:
        """Requests, retries, faults and cache hits since the last time, by metric."""
        return self._counts.take()

    def check_sources(self, sources: Iterable[str]) -> None:
        """Raise a UserError, before anything is sampled, if some data source cannot be scored."""
        names = list(sources)
        for routed in self._builder.routed:
            routed.check_sources(names)

    def apply_fault_policy(self, scored: Sequence[ScoredGroup]) -> list[Rollout]:
        """The rollouts to leave out; a UserError when `reward.on_fault` says to stop instead."""
        return apply_fault_policy(scored, self._tolerance)

    def close(self) -> None:
        """End every process and what the run brought, close the cache. Twice is allowed."""
        self._pool.close()
        if self._closing is not None:
            self._closing()
        if self._cache is not None:
            self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
