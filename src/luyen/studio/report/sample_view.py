"""One rollout for people: its tokens in colours, the tree of its reward, its tool calls."""

import json

from luyen.base.calls import ToolCall
from luyen.base.records import Branch, Score, Source
from luyen.studio.report.markup import Child, Html, element, joined, number, table
from luyen.studio.report.token_text import TokenText
from luyen.telemetry.rollout_files import Advantages, RecordedRollout

_FIRST, _LAST = 400, 200
"""Tokens shown of a long rollout: so many from each end."""
_MOST_TEXT = 2000
_ORIGINS = {
    Source.PROMPT: "prompt",
    Source.SAMPLED: "sampled",
    Source.TOOL: "tool",
    Source.TEMPLATE: "template",
}


def legend() -> Html:
    """What the colours mean."""
    kinds = [element("span", name, class_=f"s{int(source)}") for source, name in _ORIGINS.items()]
    words = ". A sampled token with an advantage is green where it is above 0 and red below; "
    more = "one without was not trained on. Point at a token for its numbers."
    spaced = [part for kind in kinds for part in (kind, ", ")][:-1]
    return element("p", "Tokens by origin: ", *spaced, words, more, class_="dim")


def sample(name: str, recorded: RecordedRollout, text: TokenText) -> Html:
    """One rollout with everything that is known about it."""
    rollout = recorded.rollout
    reward = "not judged" if rollout.score is None else f"reward {number(rollout.score.value)}"
    head = f"{name}: {reward}"
    place = f" {rollout.group}/{rollout.sample}, ended: {rollout.stop.value}"
    rows = recorded.earlier or (None,) * len(rollout.earlier)
    streams = [
        _tokens(branch, row, text)
        for branch, row in zip(rollout.branches, (*rows, recorded.advantages), strict=True)
    ]
    fault = None if rollout.fault is None else element("p", f"Fault: {rollout.fault}")
    left_out = (
        element("p", "The step did not train on it.", class_="dim")
        if recorded.advantages is None
        else None
    )
    tree = None if rollout.score is None else element("ul", _tree(rollout.score), class_="tree")
    return element(
        "div",
        element("b", head),
        element("span", place, class_="dim"),
        fault,
        left_out,
        *streams,
        tree,
        _calls(rollout.calls),
        class_="sample",
    )


def _tokens(branch: Branch, advantages: Advantages | None, text: TokenText) -> Html:
    count = len(branch.tokens)
    row = advantages if advantages is not None else (None,) * count
    largest = max((abs(a) for a in row if a is not None), default=0.0) or 1.0
    places = list(range(count))
    if count > _FIRST + _LAST:
        places = [*places[:_FIRST], *places[-_LAST:]]
    parts: list[Html] = []
    for i in places:
        if i == count - _LAST and count > _FIRST + _LAST:
            words = f" ... {count - _FIRST - _LAST:,} tokens left out ... "
            parts.append(element("span", words, class_="cut"))
        parts.append(_token(branch, i, row[i], largest, text))
    return element("div", *parts, class_="tokens")


def _token(
    branch: Branch, place: int, advantage: float | None, largest: float, text: TokenText
) -> Html:
    token, source, logp = branch.tokens[place], branch.sources[place], branch.logps[place]
    facts = [f"id {token}", _ORIGINS[source], f"turn {branch.turns[place]}"]
    facts += [] if logp is None else [f"logp {logp:.4f}"]
    facts += [] if advantage is None else [f"advantage {number(advantage)}"]
    style = None
    if advantage:
        colour = "--good" if advantage > 0 else "--bad"
        style = f"background:rgba(var({colour}),{0.12 + 0.4 * abs(advantage) / largest:.2f})"
    title = ", ".join(facts)
    return element("span", text(token), class_=f"s{int(source)}", style=style, title=title)


def _tree(score: Score) -> Html:
    """A score and what it was made from."""
    weight = "" if score.weight == 1.0 else f" x {number(score.weight)}"
    error = "" if score.error is None else f" ({score.error})"
    parts = [_tree(part) for part in score.parts]
    inner = element("ul", *parts, class_="tree") if parts else None
    words = f"{score.name}: {number(score.value)}{weight}{score.remarks()}{error}"
    return element("li", words, inner)


def _calls(calls: tuple[ToolCall, ...]) -> Html | None:
    if not calls:
        return None
    rows: list[tuple[Child, ...]] = [
        (
            str(call.turn),
            call.name or "unreadable",
            element("code", _cut(json.dumps(dict(call.arguments), default=repr))),
            call.status.value + (f": {call.error}" if call.error else ""),
            element("pre", _cut(call.result)),
        )
        for call in calls
    ]
    head = ("turn", "tool", "arguments", "status", "result")
    return joined(element("h3", "Tool calls"), table(head, rows))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ..."
