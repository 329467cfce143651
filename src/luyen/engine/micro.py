"""How a batch is cut into passes that fit the memory."""

from collections.abc import Sequence

from luyen.base.errors import UserError


def by_tokens(
    lengths: Sequence[int], *, budget: int, groups: Sequence[int] | None = None
) -> list[list[int]]:
    """Sequences in as few passes as a largest-first fit finds, none above `budget` tokens.

    Sequences of one group travel together where they fit, so that their prompt is computed once.
    The budget is hard: a sequence that exceeds it alone is refused.

    Example:
        >>> by_tokens([5, 3, 4, 2], budget=7)
        [[0, 3], [2, 1]]
        >>> by_tokens([5, 3, 4, 2], budget=7, groups=[0, 1, 1, 0])
        [[0, 3], [1, 2]]
    """
    units = _units(lengths, budget, groups)
    sizes = [sum(lengths[i] for i in unit) for unit in units]
    passes: list[list[int]] = []
    room: list[int] = []
    for unit in sorted(range(len(units)), key=lambda u: (-sizes[u], units[u])):
        place = next((p for p, free in enumerate(room) if free >= sizes[unit]), None)
        if place is None:
            passes.append([])
            room.append(budget)
            place = len(passes) - 1
        passes[place] += units[unit]
        room[place] -= sizes[unit]
    return passes


def _units(lengths: Sequence[int], budget: int, groups: Sequence[int] | None) -> list[list[int]]:
    """What travels together: a group, or as much of it as a pass holds."""
    units: list[list[int]] = []
    open_unit: dict[int, int] = {}
    for index, length in enumerate(lengths):
        if length > budget:
            raise UserError(
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
                budget,
                f"a sequence has {length} tokens and a pass may not be cut through it",
                f"set it to at least {length}, or shorten sequences",
            )
        label = index if groups is None else groups[index]
        unit = open_unit.get(label)
        if unit is None or sum(lengths[i] for i in units[unit]) + length > budget:
            open_unit[label] = len(units)
            units.append([index])
        else:
            units[unit].append(index)
    return units


def by_count(lengths: Sequence[int], *, size: int) -> list[list[int]]:
    """Passes of `size` sequences, in order.

    Example:
        >>> by_count([5, 3, 4], size=2)
        [[0, 1], [2]]
    """
    return [list(range(i, min(i + size, len(lengths)))) for i in range(0, len(lengths), size)]
