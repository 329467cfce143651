"""`UserError`, the one exception meant for users, and suggestions of near names for its fix."""

from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Any, final

from luyen.base.secrets import masked, masked_tree


@final
class UserError(Exception):
    """An error the user can fix: it names the field, the value, the reason and the fix.

    Example:
        >>> print(UserError("rollout.n", 1, "one sample has no siblings", "set rollout.n >= 2"))
        rollout.n = 1: one sample has no siblings. Fix: set rollout.n >= 2

    It holds no secret, so that it may be printed, logged and written anywhere.
    """

    def __init__(self, field: str, value: Any, why: str, fix: str) -> None:
        value, why, fix = masked_tree(value, field), masked(why), masked(fix)
        super().__init__(field, value, why, fix)
        self.field = field
        self.value = value
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r}: {self.why}. Fix: {self.fix}"


# "Did you mean": edit distance with swaps, ties broken by similarity.
#
# Also how a value of theirs is shown to them.


def edit_distance(a: str, b: str, *, limit: int) -> int:
    """Insertions, deletions, substitutions and neighbour swaps from a to b; limit + 1 if more."""
    if abs(len(a) - len(b)) > limit:
        return limit + 1
    before: list[int] = []
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(previous[j] + 1, row[-1] + 1, previous[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        if min(row) > limit:
            return limit + 1
        before, previous = previous, row
    return previous[-1]


def near_names(name: str, known: Iterable[str], *, most: int = 3) -> list[str]:
    """The known names closest to `name`, best first; empty when nothing is close.

    Example:
        >>> near_names("clip_hgih", ["clip_low", "clip_high", "gamma"])
        ['clip_high']
    """
    if len(name) < 2:
        return []  # every short name is one edit away from a single letter
    limit = max(1, len(name) // 3)
    scored: list[tuple[int, float, str]] = []
    for candidate in known:
        distance = edit_distance(name.lower(), candidate.lower(), limit=limit)
        if distance <= limit:
            likeness = SequenceMatcher(None, name, candidate).ratio()
            scored.append((distance, -likeness, candidate))
    scored.sort()
    return [candidate for _, _, candidate in scored[:most]]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that offers the nearest names, or lists what is known when none is near."""
    names = sorted(known)
    near = near_names(name, names)
    if near:
        return "did you mean " + " or ".join(f"`{n}`" for n in near) + "?"
    return "known: " + ", ".join(names)


def shortened(value: object, *, most: int = 200) -> object:
    """The value; as the beginning of its text where that would fill more than some lines.

    Example:
        >>> shortened([1, 2]), shortened("ab" * 100, most=8)
        ([1, 2], 'ababa...')
    """
    try:
        text = str(value)
    except (ValueError, RecursionError):  # a number of too many digits, a list without a bottom
        return f"({type(value).__name__})"
    return value if len(text) <= most else f"{text[: most - 3]}..."


def printable(text: str) -> str:
    """The text with everything escaped that a terminal obeys, or cannot write.

    Example:
        >>> print(printable("a" + chr(27) + "[2J b"))
        a\\x1b[2J b
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
