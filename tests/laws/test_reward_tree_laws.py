"""A tree of any shape scores as its definition says, whoever is judged beside whom."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from luyen.base.records import Prompt, Rollout, Score
from luyen.config.schema.reward import ComponentConfig, GateConfig
from luyen.rewards.protocol import Group
from luyen.rewards.running_stats import RunningMoments
from luyen.rewards.tree import Node, RewardTree, below, combined
from tests.unit.rewards.builders import group, prompt

NAMES = ("a", "b", "c")
VALUES = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0])
WEIGHTS = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0])
WAYS = ("sum", "product", "min", "lexicographic")
LIMITS = st.none() | st.sampled_from([0.0, 1.0])


@dataclass
class Source:
    """Knows the value of each answer, and which it was asked about."""

    values: Mapping[str, float | None]
    asked: list[str] = field(default_factory=list)
    names = ("source",)

    async def __call__(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        await asyncio.sleep(0)
        self.asked += [rollout.text for rollout in rollouts]
        return [self._score(self.values[rollout.text]) for rollout in rollouts]

    def _score(self, value: float | None) -> Score:
        return Score(name="source", value=value, error="lost" if value is None else None)


@st.composite
def trees(draw: st.DrawFn, depth: int = 2) -> dict[str, ComponentConfig]:
    names = NAMES[: draw(st.integers(1, 3))]
    made: dict[str, ComponentConfig] = {}
    for index, name in enumerate(names):
        keys: dict[str, Any] = {"weight": draw(WEIGHTS), "bar": draw(VALUES)}
        keys |= {"scale": draw(st.sampled_from([1.0, -2.0])), "floor": draw(LIMITS)}
        if index and draw(st.booleans()):
            by = names[draw(st.integers(0, index - 1))]
            keys["gate"] = GateConfig(by=by, at_least=draw(VALUES), otherwise=draw(VALUES))
        if depth and draw(st.booleans()):
            parts = draw(trees(depth=depth - 1))
            made[name] = ComponentConfig(parts=parts, combine=draw(st.sampled_from(WAYS)), **keys)
        else:
            made[name] = ComponentConfig(rule="exact", **keys)
    return made


def expected(
    parts: Mapping[str, ComponentConfig],
    combine: str,
    values: Mapping[str, float | None],
    path: str,
) -> float | None:
    """The definition, for one answer: None where something is lost."""
    found: dict[str, float | None] = {}
    for name, node in parts.items():
        gate = node.gate
        wanted = [(gate.by, gate.at_least or 0.0, gate.otherwise)] if gate is not None else []
        if combine == "lexicographic":
            wanted += [(one, parts[one].bar, 0.0) for one in found]
        if any(found[by] is None for by, _, _ in wanted):
            found[name] = None
            continue
        shut = [otherwise for by, bar, otherwise in wanted if (found[by] or 0.0) < bar]
        if shut:
            found[name] = shut[0]
            continue
        here = f"{path}/{name}"
        raw = values[here]
        if node.parts is not None:
            raw = expected(node.parts, node.combine, values, here)
        scaled = None if raw is None else max(node.scale * raw, -inf)
        if scaled is not None and node.floor is not None:
            scaled = max(scaled, node.floor)
        found[name] = scaled
    if any(value is None for value in found.values()):
        return None
    terms = [(parts[name].weight, value or 0.0) for name, value in found.items()]
    counted = [weight * value for weight, value in terms if weight]
    if combine in ("sum", "lexicographic"):
        return sum(counted)
    return (prod(counted) if combine == "product" else min(counted)) if counted else 0.0


def paths(parts: Mapping[str, ComponentConfig], path: str = "") -> list[str]:
    own = [f"{path}/{name}" for name in parts]
    return own + [p for n, node in parts.items() for p in paths(node.parts or {}, f"{path}/{n}")]


def judged(
    parts: Mapping[str, ComponentConfig],
    combine: str,
    table: Mapping[str, Mapping[str, float | None]],
    groups: Sequence[Group],
) -> tuple[list[list[Score]], dict[str, Source]]:
    sources: dict[str, Source] = {}

    def leaf(path: str, component: ComponentConfig) -> Source:
        values = {text: row[f"/{path}"] for text, row in table.items()}
        return sources.setdefault(path, Source(values))

    waves, order = below("", parts, combine, leaf)
    root = Node(path="reward", component=ComponentConfig(combine=combine), waves=waves, order=order)
    tree = RewardTree(root, moments=RunningMoments([]), num_workers=2)
    return asyncio.run(tree.score_groups(groups)), sources


@given(trees(), st.sampled_from(WAYS), st.data())
@settings(max_examples=120)
def test_a_tree_scores_as_its_definition_says(parts, combine, data):
    rows = st.fixed_dictionaries({path: st.none() | VALUES for path in paths(parts)})
    table = {text: data.draw(rows) for text in ("p", "q", "r", "s")}
    groups = [group(prompt(), "p", "q", "r"), group(prompt("1"), "s", draw=1)]
    scores, sources = judged(parts, combine, table, groups)
    by_text = dict(zip("pqrs", [*scores[0], *scores[1]], strict=True))
    for text, score in by_text.items():
        wanted = expected(parts, combine, table[text], "")
        assert (score.value is None) == (wanted is None)
        assert score.value is None or abs(score.value - wanted) < 1e-9
        assert (score.error is None) == (score.value is not None)
    # Nobody is judged twice, and whoever is alone is judged as in company.
    assert all(len(set(s.asked)) == len(s.asked) for s in sources.values())
    alone, _ = judged(parts, combine, table, [group(prompt(), "q")])
    assert alone[0][0] == by_text["q"]


@given(st.lists(st.tuples(VALUES, WEIGHTS), min_size=1, max_size=4), st.sampled_from(WAYS))
def test_the_order_of_parts_does_not_change_what_they_make(pairs, how):
    parts = [Score(name=str(i), value=v, weight=w) for i, (v, w) in enumerate(pairs)]
    one, other = (combined(some, how=how).value for some in (parts, parts[::-1]))
    assert one is not None
    assert other is not None
    assert abs(one - other) < 1e-9
