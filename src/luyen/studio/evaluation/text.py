"""The report of `luyen eval` as text."""

from collections.abc import Iterator, Mapping, Sequence
from math import isclose
from typing import Any

from luyen.studio.evaluation.compare import Difference, Flip, PolicyComparison
from luyen.studio.evaluation.summary import MeanEstimate, SourceSummary

_INDENT = "    "


def summary_lines(summaries: Sequence[SourceSummary]) -> Iterator[str]:
    """A table of accuracy and reward for every source, one of each k, and what is left out."""
    width = max(len("source"), *(len(found.source) for found in summaries))
    yield f"{'source':{width}s}  {_share_name(summaries):8s}  95 % (Wilson)   reward  95 % (BCa)"
    for found in summaries:
        measures = {measure.name: measure for measure in found.measures}
        if not measures:
            yield f"{found.source:{width}s}  no sample has a reward"
            continue
        (low, high), reward = found.wilson, measures["reward"]
        yield (
            f"{found.source:{width}s}  {measures['accuracy'].value:8.3f}  {low:.3f} to {high:.3f}  "
            f"{reward.value:6.3f}  {reward.interval.low:.3f} to {reward.interval.high:.3f}"
        )
    yield from _k_lines(summaries, width)
    for found in summaries:
        if found.faults:
            yield f"{found.source}: {_counted(found.faults, 'sample')} without a reward, left out"


def _share_name(summaries: Sequence[SourceSummary]) -> str:
    """`accuracy` where every reward is 0 or 1, so that it is the mean; `solved` elsewhere."""
    values = [{m.name: m.value for m in found.measures} for found in summaries if found.measures]
    is_accuracy = all(isclose(v["accuracy"], v["reward"], abs_tol=1e-12) for v in values)
    return "accuracy" if is_accuracy else "solved"


def _k_lines(summaries: Sequence[SourceSummary], width: int) -> Iterator[str]:
    """A line for each source and k, where a prompt has more than one sample."""
    rows = [(found, m) for found in summaries for m in found.measures if "@" in m.name]
    if not any(measure.name != "pass@1" for _, measure in rows):
        return
    yield ""
    yield f"{'source':{width}s}  measure   value  95 % (BCa)"
    for found, measure in rows:
        yield f"{found.source:{width}s}  {_measure_words(found, measure)}"


def _measure_words(found: SourceSummary, measure: MeanEstimate) -> str:
    ends = f"{measure.interval.low:.3f} to {measure.interval.high:.3f}"
    method = "" if measure.interval.method != "wilson" else "  (Wilson: all prompts alike)"
    few = "" if measure.prompts == found.prompts else f"  over {measure.prompts} prompts"
    return f"{measure.name:8s} {measure.value:6.3f}  {ends}{method}{few}"


def sample_lines(rows: Sequence[Mapping[str, Any]], shown: int) -> Iterator[str]:
    """The first answer to each of the first prompts."""
    first = [row for row in rows if row["sample"] == 0][:shown]
    if first:
        yield ""
        yield "Samples"
    for row in first:
        yield f"  {_one_line(str(row['prompt'][-1]['content']))}"
        yield f"{_INDENT}{_words(row)}"


def sampling_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """Differing sampling parameters of two rows; with equal ones they share random numbers."""
    one, two = first.get("decoding") or {}, second.get("decoding") or {}
    for name in sorted({*one, *two}):
        if one.get(name) != two.get(name):
            yield f"  sampled differently: {name} {one.get(name)} and {two.get(name)}"


def comparison_lines(found: PolicyComparison, *, shown: int) -> Iterator[str]:
    """The second policy against the first."""
    only = [f"{_counted(n, 'prompt')} only in the {which}" for n, which in _unpaired(found)]
    if only:
        yield f"  left out: {', '.join(only)}"
    for difference in found.differences:
        yield ""
        yield from _difference_lines(difference)
    for title, flips in (("Gained by the second", found.gained), ("Lost by it", found.lost)):
        if flips:
            yield ""
            yield f"{title}: {_counted(len(flips), 'prompt')}"
            yield from _flip_lines(flips[:shown])
            if len(flips) > shown:
                yield f"  and {len(flips) - shown} more (--show, or --json)"


def _unpaired(found: PolicyComparison) -> list[tuple[int, str]]:
    return [(n, w) for n, w in zip(found.unpaired, ("first", "second"), strict=True) if n]


def _difference_lines(found: Difference) -> Iterator[str]:
    test = "McNemar's exact test" if found.test == "mcnemar" else "sign test over prompts"
    yield f"{found.source}: {_counted(found.prompts, 'prompt')}"
    share = "accuracy" if isclose(found.accuracy, found.reward, abs_tol=1e-12) else "solved"
    yield (
        f"  {share:8s}  {found.first:.3f} -> {found.second:.3f}  {found.accuracy:+.3f}"
        f"  95 % {found.interval.low:+.3f} to {found.interval.high:+.3f} (paired BCa bootstrap)"
    )
    ends = found.reward_interval
    yield f"  reward    {found.reward:+.3f}  95 % {ends.low:+.3f} to {ends.high:+.3f}"
    yield f"  {found.better} better, {found.worse} worse: p = {found.p:.3g} ({test})"
    if found.is_significant:
        yield f"  the {'second' if found.accuracy > 0 else 'first'} is better"
        return
    # A share cannot differ by more than 1: so few prompts detect no difference at all.
    now = f"these detect {found.visible:.3f}" if found.visible <= 1 else "these detect none"
    yield (
        f"  no significant difference with these {found.prompts} prompts; {found.needed} would be "
        f"needed to detect {found.needed_for:.3f}, and {now}"
    )


def _flip_lines(flips: Sequence[Flip]) -> Iterator[str]:
    for flip in flips:
        yield f"  {_one_line(flip.question)}   ({flip.first:.2f} -> {flip.second:.2f})"
        for answer, which in zip(flip.answers, ("first: ", "second:"), strict=True):
            yield f"{_INDENT}{which} {_one_line(answer)}"


def _words(row: Mapping[str, Any]) -> str:
    reward, truth = row["reward"], row["ground_truth"]
    judged = f"reward {reward:g}" if reward is not None else f"no reward: {row['fault']}"
    right = f", ground truth {truth}" if truth is not None else ""
    return f"{_one_line(row['answer'])}   ({judged}{right})"


def _one_line(text: str, most: int = 100) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= most else flat[: most - 3] + "..."


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
