"""Which rank gets which sequences: tokens balanced, groups together where that costs little."""

from collections.abc import Iterator, Sequence

_SLACK = 1.1
"""How far the fullest rank may be above the least possible, for the sake of whole groups."""


def deal(lengths: Sequence[int], groups: Sequence[int], *, ranks: int) -> list[list[int]]:
    """Indices of the sequences of each rank, ascending.

    Sequences of a group share their prompt, and are cut apart only as far as the balance demands:
    whole groups are tried first, then ever smaller pieces. The fullest rank has at most 1.1 times
    the larger of mean and longest sequence, or, where no deal achieves that, at most the mean and
    one sequence more. Nothing is drawn: the same sequences are always dealt the same way.

    Example:
        >>> deal([4, 4, 3, 3], [0, 0, 1, 1], ranks=2)
        [[0, 2], [1, 3]]
        >>> deal([4, 4, 4, 4], [0, 0, 1, 1], ranks=2)
        [[0, 1], [2, 3]]
    """
    least = max(sum(lengths) / ranks, max(lengths, default=0))
    best: list[list[int]] = []
    fewest = float("inf")
    for limit in _limits(sum(lengths), ranks):
        dealt = _largest_first(lengths, _pieces(lengths, groups, limit), ranks)
        fullest = max(sum(lengths[i] for i in hand) for hand in dealt)
        if fullest < fewest:
            best, fewest = dealt, fullest
        if fewest <= _SLACK * least:
            break
    return best


def _limits(total: int, ranks: int) -> Iterator[int]:
    """Most tokens of a piece: a whole group, then parts of a rank's fair share, then a sequence."""
    yield total
    yield from (total // (ranks * parts) for parts in (1, 2, 4, 8))
    yield 0


def _pieces(lengths: Sequence[int], groups: Sequence[int], limit: int) -> list[list[int]]:
    """Groups, cut where they would have more than `limit` tokens; a sequence is never cut."""
    pieces: list[list[int]] = []
    size: list[int] = []
    last: dict[int, int] = {}
    for index, (length, group) in enumerate(zip(lengths, groups, strict=True)):
        at = last.get(group)
        if at is None or size[at] + length > limit:
            last[group] = len(pieces)
            pieces.append([index])
            size.append(length)
        else:
            pieces[at].append(index)
            size[at] += length
    return pieces


def _largest_first(
    lengths: Sequence[int], pieces: Sequence[Sequence[int]], ranks: int
) -> list[list[int]]:
    """Each piece, the largest first, to the rank that has the fewest tokens."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    sized = [(sum(lengths[i] for i in piece), piece) for piece in pieces]
    for size, piece in sorted(sized, key=lambda pair: (-pair[0], pair[1][0])):
        rank = min(range(ranks), key=lambda r: (tokens[r], r))
        hands[rank] += piece
        tokens[rank] += size
    return [sorted(hand) for hand in hands]
