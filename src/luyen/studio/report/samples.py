"""Example rollouts of the report, with coloured tokens, the reward tree and tool calls."""

import hashlib
import json

from luyen.base.records import Branch, Score, Source, ToolCall
from luyen.studio.doctor.record import RunRecord
from luyen.studio.doctor.vocabulary import TokenText
from luyen.studio.report.html import Html, element, joined, missing, number
from luyen.telemetry.rollout_files import Advantages, RecordedRollout

# One rollout as HTML.

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
    """Legend of the token colours."""
    kinds = [element("span", name, class_=f"s{int(source)}") for source, name in _ORIGINS.items()]
    words = (
        ". The ground of a sampled token is blue where its advantage is above 0 and orange below; "
    )
    more = "one without an advantage was not trained on. Point at a token for its numbers."
    spaced = [part for kind in kinds for part in (kind, ", ")][:-1]
    return element("p", "Tokens by origin: ", *spaced, words, more, class_="dim")


def sample(name: str, recorded: RecordedRollout, text: TokenText) -> Html:
    """One rollout with tokens, scores and tool calls."""
    rollout = recorded.rollout
    rows = recorded.earlier or (None,) * len(rollout.earlier)
    streams = [
        _tokens(branch, row, text)
        for branch, row in zip(rollout.branches, (*rows, recorded.advantages), strict=True)
    ]
    chips: dict[str, str] = {
        "Reward": "not judged" if rollout.score is None else number(rollout.score.value),
        "Rollout": f"{rollout.group}/{rollout.sample}",
        "Ended by": rollout.stop.value,
        "Tokens": number(len(rollout.tokens)),
    }
    facts = [
        element("div", element("dt", key), element("dd", value)) for key, value in chips.items()
    ]
    fault = rollout.fault and element("p", f"Fault: {rollout.fault}", class_="bad-text text")
    left_out = None
    if recorded.advantages is None:
        left_out = element("p", "The step did not train on it.", class_="dim")
    tree = element("ul", _tree(rollout.score), class_="tree") if rollout.score else None
    return element(
        "article",
        element("h3", name),
        element("dl", *facts, class_="chips"),
        fault,
        left_out,
        *streams,
        tree,
        _calls(rollout.calls),
        class_="card stack tight",
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
    return element("div", *parts, class_="tokens boxed", tabindex="0")


def _token(
    branch: Branch, place: int, advantage: float | None, largest: float, text: TokenText
) -> Html:
    token, source, logp = branch.tokens[place], branch.sources[place], branch.logps[place]
    facts = [f"id {token}", _ORIGINS[source], f"turn {branch.turns[place]}"]
    facts += [] if logp is None else [f"logp {logp:.4f}"]
    facts += [] if advantage is None else [f"advantage {number(advantage)}"]
    level = 0 if advantage is None else round(4 * advantage / largest)
    ground = "" if not level else f" {'above' if level > 0 else 'below'}{abs(level)}"
    title = ", ".join(facts)
    return element("span", text(token), class_=f"s{int(source)}{ground}", title=title)


def _tree(score: Score) -> Html:
    """A score with its components."""
    weight = None if score.weight == 1.0 else f"\u00d7 {number(score.weight)}"
    row = element(
        "div",
        element("span", score.name),
        element("strong", number(score.value), class_="num"),
        element("span", weight, class_="dim small") if weight else None,
        element("span", score.remarks().strip(), class_="dim small") if score.remarks() else None,
        element("span", score.error, class_="tag bad") if score.error is not None else None,
        class_="row",
    )
    parts = [_tree(part) for part in score.parts]
    return element("li", row, element("ul", *parts, class_="tree") if parts else None)


def _calls(calls: tuple[ToolCall, ...]) -> Html | None:
    if not calls:
        return None
    return joined(
        element("h3", "Tool calls"), element("ol", *map(_call, calls), class_="tool-calls")
    )


def _call(call: ToolCall) -> Html:
    facts = f"turn {call.turn}, {call.status.value}, {call.seconds:.3g} s"
    head = element(
        "div",
        element("strong", call.name or "unreadable", class_="mono"),
        element("span", facts, class_="dim small"),
        class_="row between",
    )
    said = {
        "Arguments": json.dumps(dict(call.arguments), default=repr, ensure_ascii=False),
        "Result": call.result,
    }
    columns = [
        element("div", element("span", title, class_="dim"),
                element("div", _cut(words), class_="text mono"))
        for title, words in said.items()
    ]  # fmt: skip
    error = element("p", call.error, class_="bad-text small text") if call.error else None
    return element("li", head, error, element("div", *columns, class_="columns small"))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ..."


def samples_section(record: RunRecord) -> Html:
    """Samples of the first and the last step whose rollouts are there."""
    steps = list(record.rollouts)
    if not steps:
        return missing("There are no rollouts: the run was supervised, or they were removed.")
    text = TokenText(record.config.actor_rollout_ref.model)
    seed = str(record.manifest.get("run_id"))
    parts: list[Html] = [legend()]
    if not text.is_known:
        parts.append(missing("The tokenizer is not on this machine: tokens are shown as numbers."))
    for step in dict.fromkeys((steps[0], steps[-1])):
        rollouts = record.rollouts[step]
        parts.append(element("h3", f"Step {step}, out of {len(rollouts)} rollouts that were read"))
        parts += [sample(name, one, text) for name, one in chosen(rollouts, seed)]
    return joined(*parts)


def chosen(rollouts: list[RecordedRollout], seed: str) -> list[tuple[str, RecordedRollout]]:
    """Best, worst, median, random and failed rollout; duplicates are joined under both names."""
    judged = sorted(
        (r for r in rollouts if _reward(r) is not None), key=lambda r: _reward(r) or 0.0
    )
    picked: list[tuple[str, RecordedRollout]] = []
    if judged:
        picked = [("best", judged[-1]), ("worst", judged[0]), ("median", judged[len(judged) // 2])]
    # By a hash, so that the report of a run is reproducible.
    place = int(hashlib.sha256(seed.encode()).hexdigest(), 16) % len(rollouts)
    picked.append(("random", rollouts[place]))
    broken = next((r for r in rollouts if r.rollout.fault is not None), None)
    picked += [] if broken is None else [("broken", broken)]
    names: dict[tuple[int, int, str, int], list[str]] = {}
    for name, one in picked:
        names.setdefault(one.rollout.key, []).append(name)
    shown = {one.rollout.key: one for _, one in picked}
    return [(" and ".join(found), shown[key]) for key, found in names.items()]


def _reward(recorded: RecordedRollout) -> float | None:
    score = recorded.rollout.score
    return None if score is None else score.value
