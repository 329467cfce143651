"""Who holds which page. A page is 64 tokens of keys and values of every layer."""

from collections import Counter
from collections.abc import Iterable
from typing import final

from luyen.models.paged import PAGE


def pages_of(tokens: int) -> int:
    """Pages that hold this many tokens.

    Example:
        >>> pages_of(64), pages_of(65)
        (1, 2)
    """
    return -(-tokens // PAGE)


@final
class PagePool:
    """Free pages, and how many sequences hold each of the others.

    A page is free again when its last holder has dropped it.

    Example:
        >>> pool = PagePool(2)
        >>> page = pool.take(1)
        >>> pool.share(page)
        >>> pool.drop(page)
        >>> pool.free
        1
    """

    def __init__(self, pages: int) -> None:
        self.size = pages
        self._free = list(range(pages - 1, -1, -1))
        self._holders: Counter[int] = Counter()

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Pages for one holder; there must be enough of them."""
        assert count <= self.free, "the caller asks only for what is free"
        taken = [self._free.pop() for _ in range(count)]
        self._holders.update(taken)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One holder more of each of these."""
        self._holders.update(pages)

    def drop(self, pages: Iterable[int]) -> None:
        """One holder less of each of these."""
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                del self._holders[page]
                self._free.append(page)
