"""Prompts at their place in the run: the address that every random choice derives from."""

from collections.abc import Sequence

from luyen.base.records import GroupId, Prompt
from luyen.rollout.single_turn import Draw


def draws_of(prompts: Sequence[Prompt], *, step: int, first: int, samples: int) -> list[Draw]:
    """Each prompt at its place of the run."""
    return [
        Draw(
            group=GroupId(step=step, draw=first + i, uid=prompt.uid), prompt=prompt, samples=samples
        )
        for i, prompt in enumerate(prompts)
    ]
