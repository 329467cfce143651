"""Rollouts held against a rendering of what was said in them, when there is time for it.

Nothing of a rollout depends on it but some counters: either its tokens are sound, or the run stops.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from luyen.base.records import Branch, Message, Prompt, Rollout
from luyen.data.sanity import check_against_render
from luyen.rollout.setting import Setting

UNCHECKED = "unchecked"
"""Among the notes of a rollout: its last branch was not compared yet."""


def compared(rollout: Rollout, prompt: Prompt, setting: Setting) -> Rollout:
    """The rollout with what its last branch was found to be; as it is, if that is known.

    A UserError where tokens and template disagree and the run is to stop at that.
    """
    if UNCHECKED not in rollout.notes:
        return rollout
    notes = {name: value for name, value in rollout.notes.items() if name != UNCHECKED}
    messages = (*prompt.messages, *rollout.messages)
    return replace(rollout, notes=counted(notes, rollout, messages, prompt.tools, setting))


def counted(
    notes: Mapping[str, float],
    branch: Branch | Rollout,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    setting: Setting,
) -> dict[str, float]:
    """The notes, and what a branch is found to be that ends with the last of these messages."""
    found = check_against_render(
        setting.renderer, branch=branch, messages=messages, tools=tools, mode=setting.sanity
    )
    return {**notes, **{name: notes.get(name, 0.0) + count for name, count in found.items()}}
