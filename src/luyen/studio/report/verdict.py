"""The first words of the page: how far the run came, what it reached, what is wrong with it."""

import time
from collections import Counter
from collections.abc import Sequence

from luyen.studio.doctor.findings import SEVERITIES, Finding
from luyen.studio.doctor.read import RunRecord
from luyen.studio.report.markup import Html, element, number
from luyen.telemetry.figures import MEAN, VALIDATION_REWARD, validated
from luyen.telemetry.metrics_file import series

_REACHED = (
    ("Reward", "reward/mean"),
    ("Negative log-likelihood", "sft/nll"),
    ("Negative log-likelihood of held-out rows", "sft/val_nll"),
    ("Held-out preference accuracy", "preference/val_accuracy"),
    ("Held-out accuracy of judging", "reward_model/val_accuracy"),
    ("Held-out divergence from the teacher", "distill/val_divergence"),
    ("Reverse KL to the teacher", "distill/reverse_kl"),
)
_LIVE_S = 300.0
"""A run that wrote within so many seconds may still be going on."""


def verdict(record: RunRecord, findings: Sequence[Finding], *, total: int | None) -> Html:
    """A box whose colour is that of the worst finding."""
    worst = next((s for s in SEVERITIES if any(f.severity == s for f in findings)), "note")
    lines = [_progress(record, total), *_reached(record), _health(findings)]
    lines += [f"Cannot be read: {one.file}: {one.why}" for one in record.damaged()]
    kind = "error" if record.unread else worst
    return element("div", *(element("p", line) for line in lines), class_=f"verdict {kind}")


def _progress(record: RunRecord, total: int | None) -> str:
    done = record.steps[-1].step if record.steps else 0
    if done == 0:
        return "The run has not finished a step."
    if total is not None and done >= total:
        return f"Finished: all {total} steps."
    of = f" of {total}" if total is not None else ""
    return f"{done} steps{of} are done; {_last_sign(record)}."


def _last_sign(record: RunRecord) -> str:
    """Whether it may be alive, by when it last wrote."""
    silent = time.time() - record.directory.metrics.stat().st_mtime
    if silent < _LIVE_S:
        return "it wrote less than five minutes ago and may be going on"
    unit, size = ("hours", 3600.0) if silent > 7200 else ("minutes", 60.0)
    return f"it has not written for {silent / size:.0f} {unit}"


def _validation(record: RunRecord) -> list[tuple[str, str]]:
    """What validations measured: an accuracy only where all their scores are 0 or 1."""
    found = [line.values for line in record.lines if "val/accuracy" in line.values]
    if any(VALIDATION_REWARD in validated(values) for values in found):
        return [("Validation reward", name) for name in found[-1] if name.startswith(MEAN)]
    return [("Validation accuracy", "val/accuracy")]


def _reached(record: RunRecord) -> list[str]:
    said: list[str] = []
    for label, name in (_REACHED[0], *_validation(record), *_REACHED[1:]):
        course = record.course(name)
        if course.has_both_ends:
            ends = f"{number(course.start())} to {number(course.end())}"
            said.append(f"{label} went from {ends} (medians of the first and last steps).")
            continue
        # Few values, such as validations: the first and the last as they are.
        steps, values = series(list(record.lines), name)
        if len(values) > 1:
            where = f"(steps {steps[0]} and {steps[-1]})"
            said.append(f"{label} went from {number(values[0])} to {number(values[-1])} {where}.")
        elif values:
            said.append(f"{label} is {number(values[0])} (step {steps[0]}).")
    return said


def _health(findings: Sequence[Finding]) -> str:
    if not findings:
        return "The doctor has no findings."
    counts = Counter(finding.severity for finding in findings)
    listed = [f"{counts[s]} {s}{'s' if counts[s] > 1 else ''}" for s in SEVERITIES if counts[s]]
    return f"The doctor has {' and '.join(listed)}; the worst: {findings[0].symptom.says}"
