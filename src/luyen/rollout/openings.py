"""Prompts as tokens, rendered once for all samples of a group."""

from array import array
from collections.abc import Sequence
from typing import final

from luyen.base.errors import UserError
from luyen.base.records import Prompt
from luyen.data.render import Renderer

_KEPT = 4096
"""Prompts of which the tokens are kept, or as many as a step has; the oldest go first."""


@final
class Openings:
    """What conversations open with, where no world says something else."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        # A prompt is known by its place in memory, and stays there as long as it is known.
        self._known: dict[int, tuple[Prompt, Sequence[int]]] = {}
        self._most = _KEPT

    def tokens(self, prompt: Prompt) -> Sequence[int]:
        """The tokens after which the policy speaks."""
        found = self._known.get(id(prompt))
        if found is not None:
            return found[1]
        made = array("l", self._renderer.prompt_tokens(prompt.messages, prompt.tools))
        while len(self._known) >= self._most:
            del self._known[next(iter(self._known))]
        self._known[id(prompt)] = prompt, made
        return made

    def foresee(self, prompts: Sequence[Prompt]) -> None:
        """Have the tokens of these ready; what cannot be rendered is told when it is played."""
        self._most = max(_KEPT, len(prompts))
        for prompt in prompts:
            if prompt.messages:
                try:
                    self.tokens(prompt)
                except UserError:
                    continue
