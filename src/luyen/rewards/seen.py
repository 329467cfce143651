"""The values of a step that running normalisation counts, read from the trees of its rollouts."""

from collections.abc import Mapping, Sequence

from luyen.base.records import Score
from luyen.config.schema.reward import Component
from luyen.rewards.node import shape
from luyen.rewards.step import Scored


def values_seen(
    scored: Sequence[Scored], running: Mapping[str, Component]
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

    A manager may have put the whole tree beside a part of its own; then it is called `score`.

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
