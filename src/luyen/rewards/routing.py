"""Which components judge a row: decided by its data source, and never by default."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import final

from luyen.base.errors import UserError
from luyen.base.records import Prompt, Rollout, Score
from luyen.config.schema.reward import Component
from luyen.rewards.protocol import Group
from luyen.rewards.tree import Tree, together

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
"""Pattern of a data source -> the rule that judges it when the configuration says nothing."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Components for the data sources that match a pattern.

    Example:
        >>> route = Route(pattern="math*", components={"math": Component(rule="math")})
        >>> route.matches("math_dapo"), route.matches("MATH")
        (True, False)
    """

    pattern: str
    """`*` stands for anything, `?` for one letter; capitals matter."""
    components: Mapping[str, Component]
    """Name in the tree -> its node."""

    def matches(self, source: str) -> bool:
        """Whether rows of this source take the route."""
        return fnmatchcase(source, self.pattern)


def routes_in_force(
    routes: Mapping[str, Sequence[str]], components: Mapping[str, Component]
) -> list[Route]:
    """The routes in force, in the order in which they are tried."""
    if components and not routes:
        return [Route(pattern="*", components=components)]
    own = [
        Route(
            pattern=pattern, components={n: components.get(n) or Component(rule=n) for n in names}
        )
        for pattern, names in routes.items()
    ]
    built_in = [
        Route(pattern=pattern, components={rule: Component(rule=rule)})
        for pattern, rule in BUILT_IN.items()
    ]
    return own + built_in


@final
class Routed:
    """Judges each group by the first route that its data source matches."""

    def __init__(
        self, routes: Sequence[Route], *, build: Callable[[Mapping[str, Component]], Tree]
    ) -> None:
        """`build` makes a tree of components; a route is built when a row first takes it."""
        self._routes = tuple(routes)
        self._build = build
        self._built: dict[str, Tree] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the components of all routes."""
        return tuple(dict.fromkeys(name for route in self._routes for name in route.components))

    async def __call__(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        """One tree per rollout."""
        return await self._tree(prompt.data_source)(prompt, rollouts)

    async def judge(self, groups: Sequence[Group]) -> list[list[Score]]:
        """One tree per rollout of every group, in order; each route sees its groups at once."""
        taken: dict[Tree, list[int]] = {}
        for index, (prompt, _) in enumerate(groups):
            taken.setdefault(self._tree(prompt.data_source), []).append(index)
        columns = await together([t.judge([groups[i] for i in own]) for t, own in taken.items()])
        found: dict[int, list[Score]] = {}
        for own, rows in zip(taken.values(), columns, strict=True):
            found |= zip(own, rows, strict=True)
        return [found[index] for index in range(len(groups))]

    def check_sources(self, sources: Iterable[str]) -> None:
        """Raise a UserError that lists every source without a route; build the routes of others."""
        asked = dict.fromkeys(sources)
        lost = [s for s in asked if not any(route.matches(s) for route in self._routes)]
        if lost:
            raise UserError("data_source", ", ".join(lost), self._why(), self._fix(lost[0]))
        for source in asked:
            self._tree(source)

    def _tree(self, source: str) -> Tree:
        route = next((route for route in self._routes if route.matches(source)), None)
        if route is None:
            raise UserError("data_source", source, self._why(), self._fix(source))
        if route.pattern not in self._built:
            self._built[route.pattern] = self._build(route.components)
        return self._built[route.pattern]

    def _why(self) -> str:
        patterns = ", ".join(route.pattern for route in self._routes)
        return f"no reward judges rows of this source (routes: {patterns})"

    def _fix(self, source: str) -> str:
        return (
            f"set reward.routes={{{source!r}: [RULE]}}, reward.components, or "
            "reward.custom_reward_function.path; data.reward_fn_key names the column"
        )
