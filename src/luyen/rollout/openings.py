"""Prompts as tokens, rendered once for all samples of a group."""

from array import array
from collections.abc import Sequence
from typing import final

from luyen.base.records import Prompt
from luyen.data.render import Renderer

_KEPT = 4096
"""Prompts of which the tokens are kept; the oldest go first."""


@final
class Openings:
    """What conversations open with, where no world says something else."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        # A prompt is known by its place in memory, and stays there as long as it is known.
        self._known: dict[int, tuple[Prompt, Sequence[int]]] = {}

    def tokens(self, prompt: Prompt) -> Sequence[int]:
        """The tokens after which the policy speaks."""
        found = self._known.get(id(prompt))
        if found is not None:
            return found[1]
        made = array("l", self._renderer.prompt_tokens(prompt.messages, prompt.tools))
        while len(self._known) >= _KEPT:
            del self._known[next(iter(self._known))]
        self._known[id(prompt)] = prompt, made
        return made
