"""An answer that several versions of the weights draw, one after the other.

When the weights change, the new ones read again what was drawn so far and go on from there. Each
token keeps the log-probability and the version that it was drawn with.
"""

from dataclasses import replace
from typing import final

from luyen.base.seeds import derive_key
from luyen.rollout.protocol import Completion, Sampling


@final
class Partial:
    """What there is of an answer, and how the rest of it is drawn."""

    __slots__ = ("kept_mass", "key", "logps", "sampling", "tokens", "versions")

    def __init__(self, key: int, sampling: Sampling) -> None:
        self.key = key
        """Random key of the rest."""
        self.sampling = sampling
        """How the rest is drawn."""
        self.tokens: tuple[int, ...] = ()
        self.logps: tuple[float, ...] = ()
        self.kept_mass: tuple[float, ...] = ()
        self.versions: tuple[int, ...] = ()

    def go_on_after(self, stopped: Completion, version: int) -> None:
        """Keep what a version has drawn.

        An answer that a text may end begins anew: the text could stand across the seam.
        """
        if not stopped.tokens or self.sampling.stop_strings:
            return
        self._add(stopped, version)
        asked, count = self.sampling, len(stopped.tokens)
        self.sampling = replace(
            asked,
            max_new_tokens=asked.max_new_tokens - count,
            min_new_tokens=max(0, asked.min_new_tokens - count),
        )
        self.key = derive_key(self.key, "rest", len(self.tokens))

    def ended(self, last: Completion, version: int) -> Completion:
        """The whole answer, of which the last part has come."""
        self._add(last, version)
        return replace(
            last,
            tokens=self.tokens,
            logps=self.logps,
            kept_mass=self.kept_mass,
            versions=self.versions,
        )

    def _add(self, part: Completion, version: int) -> None:
        self.tokens += part.tokens
        self.logps += part.logps
        # A part may rule nothing out any more, where those before it did.
        whole = (1.0,) * len(part.tokens) if self.kept_mass else ()
        self.kept_mass += part.kept_mass or whole
        self.versions += (version,) * len(part.tokens)
