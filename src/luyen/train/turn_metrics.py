"""What the conversations of a step did: turns, calls, ends, and how faithful their tokens are."""

from collections.abc import Sequence
from statistics import fmean

from luyen.base.calls import CallStatus, ToolCall
from luyen.base.records import Rollout, StopReason
from luyen.telemetry.catalog import metric

_TURNS = {
    "mean": "Mean number of turns of the policy.",
    "max": "Largest number of turns of the policy.",
    "faults": "Conversations that broke and are not trained on.",
    "retries": "Times that a conversation was played again because it broke.",
    "unreleased": "Tools that failed to let go of what a conversation had opened.",
    "splits": "Times that a chat template rewrote what was said, so that a new sample began.",
    "drift": "Conversations whose template text differs from a full re-render.",
    "sampled_differs": "Turns that the template would write differently than the policy did.",
    "retokenised": "Turns whose text would be cut into other tokens than were sampled.",
}
_TOOLS = {
    "call_fraction": "Share of the conversations in which a tool is called.",
    "calls_mean": "Mean number of calls in a conversation.",
    "valid_fraction": "Share of the calls that name a tool and fit its schema.",
    "success_fraction": "Share of the calls made that the tool answered.",
}
for _family, _names in {"turns": _TURNS, "tools": _TOOLS}.items():
    for _name, _doc in _names.items():
        metric(f"{_family}/{_name}", doc=_doc)
metric("time/conversation_mean", unit="s", doc="Mean duration of a conversation.")
metric("time/conversation_max", unit="s", doc="Longest duration of a conversation.")
metric("time/tool_call_mean", unit="s", doc="Mean duration of a tool call.")
metric("turns/stop/<reason>", doc="Share of the conversations that ended for this reason.")
metric("tools/<status>_calls", doc="Calls of the step that ended this way.")
metric("tools/<tool>/calls", doc="Calls of one tool in the step.")
metric(
    "tools/<tool>/<number...>", doc="What a tool measured in a conversation, the mean over them."
)

_COUNTED = ("retries", "unreleased", "splits", "drift", "sampled_differs", "retokenised")


def turn_metrics(rollouts: Sequence[Rollout], *, is_multi_turn: bool) -> dict[str, float]:
    """Numbers about the conversations; nothing where every rollout is one answer."""
    if not is_multi_turn or not rollouts:
        return {}
    turns = [float(rollout.num_turns) for rollout in rollouts]
    seconds = [rollout.notes.get("seconds", 0.0) for rollout in rollouts]
    found = {
        "turns/mean": fmean(turns),
        "turns/max": max(turns),
        "time/conversation_mean": fmean(seconds),
        "time/conversation_max": max(seconds),
        "turns/faults": float(sum(rollout.fault is not None for rollout in rollouts)),
    }
    for name in _COUNTED:
        found[f"turns/{name}"] = sum(rollout.notes.get(name, 0.0) for rollout in rollouts)
    for reason in StopReason:
        share = fmean(rollout.stop == reason for rollout in rollouts)
        found[f"turns/stop/{reason.value.replace(' ', '_')}"] = share
    calls = [call for rollout in rollouts for call in rollout.calls]
    called = fmean(any(call.has_run for call in rollout.calls) for rollout in rollouts)
    found |= {"tools/call_fraction": called} | _call_metrics(calls, len(rollouts))
    return _tool_numbers(rollouts) | found


def _tool_numbers(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What tools measured themselves, over the conversations in which they did."""
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.notes.items():
            if name.startswith("tools/"):
                values.setdefault(name, []).append(value)
    return {name: fmean(values[name]) for name in sorted(values)}


def _call_metrics(calls: Sequence[ToolCall], rollouts: int) -> dict[str, float]:
    ran = [call for call in calls if call.has_run]
    found = {"tools/calls_mean": len(calls) / rollouts}
    if calls:
        found["tools/valid_fraction"] = fmean(call.is_valid for call in calls)
    if ran:
        found["tools/success_fraction"] = fmean(call.status == CallStatus.OK for call in ran)
        found["time/tool_call_mean"] = fmean(call.seconds for call in ran)
    for status in CallStatus:
        count = sum(call.status == status for call in calls)
        found[f"tools/{status.value.replace(' ', '_')}_calls"] = float(count)
    for name in sorted({call.name for call in ran}):
        found[f"tools/{name}/calls"] = float(sum(call.name == name for call in ran))
    return found
