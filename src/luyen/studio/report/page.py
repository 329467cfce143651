"""The HTML report of a run: verdict, findings, settings, versions, then curves and samples."""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from luyen import __version__
from luyen.base.digests import read_digests
from luyen.base.errors import UserError
from luyen.base.files import write_whole
from luyen.base.rundir import RunDirectory
from luyen.base.secrets import masked_tree
from luyen.config.fields import all_fields
from luyen.config.plan import BatchPlan, plan_batches
from luyen.config.rules.rule import value_at
from luyen.studio.doctor.diagnose import RULES, diagnose
from luyen.studio.doctor.findings import SEVERITIES, Diagnosis
from luyen.studio.doctor.record import RunRecord, read_run
from luyen.studio.report.curves import (
    curves_section,
    parity_section,
    rewards_section,
    timing_section,
)
from luyen.studio.report.html import Child, Html, element, joined, missing, number, sheet, table
from luyen.studio.report.samples import samples_section
from luyen.telemetry.display import MEAN, VALIDATION_REWARD, validated
from luyen.telemetry.metrics import series

# Verdict: progress, results and findings of the run.

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
"""A run that wrote within so many seconds may still be running."""


_TONES = {"error": "bad", "warning": "warn"}
"""Class of a severity in the style sheet."""


def verdict(record: RunRecord, findings: Sequence[Diagnosis], *, total: int | None) -> Html:
    """A box whose colour is that of the worst finding."""
    worst = next((s for s in SEVERITIES if any(f.severity == s for f in findings)), "note")
    lines = [_progress(record, total), *_reached(record), _health(findings)]
    lines += [f"Cannot be read: {one.file}: {one.why}" for one in record.damaged()]
    tone = "bad" if record.unread else _TONES.get(worst, "good")
    return element("div", *(element("p", line) for line in lines), class_=f"verdict {tone}")


def _progress(record: RunRecord, total: int | None) -> str:
    done = record.steps[-1].step if record.steps else 0
    if done == 0:
        return "The run has not finished a step."
    if total is not None and done >= total:
        return f"Finished: all {total} steps."
    of = f" of {total}" if total is not None else ""
    return f"{done} steps{of} are done; {_last_sign(record)}."


def _last_sign(record: RunRecord) -> str:
    """Whether the run may be alive, by the time of its last write."""
    silent = time.time() - record.directory.metrics.stat().st_mtime
    if silent < _LIVE_S:
        return "it wrote less than five minutes ago and may be going on"
    unit, size = ("hours", 3600.0) if silent > 7200 else ("minutes", 60.0)
    return f"it has not written for {silent / size:.0f} {unit}"


def _validation(record: RunRecord) -> list[tuple[str, str]]:
    """Label and metric of validation: an accuracy only if all rewards are 0 or 1."""
    found = [line.values for line in record.lines if "val/accuracy" in line.values]
    if any(VALIDATION_REWARD in validated(values) for values in found):
        return [("Validation reward", name) for name in found[-1] if name.startswith(MEAN)]
    return [("Validation accuracy", "val/accuracy")]


def _reached(record: RunRecord) -> list[str]:
    lines: list[str] = []
    for label, name in (_REACHED[0], *_validation(record), *_REACHED[1:]):
        curve = record.series(name)
        if curve.has_both_ends:
            ends = f"{number(curve.start())} to {number(curve.end())}"
            lines.append(f"{label} went from {ends} (medians of the first and last steps).")
            continue
        # Few values, such as validations: the first and the last as they are.
        steps, values = series(list(record.lines), name)
        if len(values) > 1:
            where = f"(steps {steps[0]} and {steps[-1]})"
            lines.append(f"{label} went from {number(values[0])} to {number(values[-1])} {where}.")
        elif values:
            lines.append(f"{label} is {number(values[0])} (step {steps[0]}).")
    return lines


def _health(findings: Sequence[Diagnosis]) -> str:
    if not findings:
        return "The doctor has no findings."
    counts = Counter(finding.severity for finding in findings)
    listed = [f"{counts[s]} {s}{'s' if counts[s] > 1 else ''}" for s in SEVERITIES if counts[s]]
    return f"The doctor has {' and '.join(listed)}; the worst: {findings[0].symptom.says}"


# Findings of the doctor.

_MOST = 12


def findings_section(findings: Sequence[Diagnosis]) -> Html:
    """Every finding, the most severe first."""
    if not findings:
        return element("p", f"None of the {len(RULES)} rules has anything to say.")
    shown = element("ul", *(_one(finding) for finding in findings), class_="findings")
    return element("div", shown, class_="card")


def _one(finding: Diagnosis) -> Html:
    seen = finding.symptom
    tone = _TONES.get(finding.severity, "")
    head = [
        element("span", finding.severity, class_=f"tag {tone}".strip()),
        element("code", finding.rule),
        element("strong", finding.title),
    ]
    steps = ", ".join(map(str, seen.steps[:_MOST])) + (", ..." if len(seen.steps) > _MOST else "")
    numbers = "; ".join(f"{name} {number(value)}" for name, value in seen.numbers.items())
    evidence = {
        "Steps": steps,
        "Numbers": numbers,
        "Rollouts": "; ".join(seen.rollouts[:_MOST]),
        f"Try ({seen.experiment.stage})": seen.experiment.change,
        "Then": "; ".join(seen.experiment.then),
    }
    rows = [
        element("div", element("dt", label), element("dd", words, class_="text"))
        for label, words in evidence.items()
        if words
    ]
    said = element("p", seen.says, class_="text")
    facts = element("dl", *rows, class_="facts") if rows else None
    return element("li", element("div", *head, class_="row"), said, facts,
                   class_=f"finding {tone or 'info'}")  # fmt: skip


# Settings: the batch plan, and every key that is not at its default.


def plan_of(record: RunRecord) -> BatchPlan | None:
    """The batch plan; None if the configuration cannot be read."""
    if _is_unread(record):
        return None
    trainer = record.config.trainer
    return plan_batches(record.config, world_size=trainer.nnodes * trainer.n_gpus_per_node)


def settings_section(record: RunRecord) -> Html:
    """The batch plan, changed keys with their origins, then all keys at their defaults."""
    plan = plan_of(record)
    if plan is None:
        return missing("config.yaml cannot be read, so what the run was told is not known.")
    try:
        origins: dict[str, str] = record.directory.read_provenance()
        note = None
    except UserError as error:
        origins, note = {}, missing(f"Where keys were written cannot be read: {error.why}.")
    changed: list[tuple[Child, ...]] = []
    rest: list[tuple[Child, ...]] = []
    for path, info in all_fields().items():
        value = _value(record, path)
        row = (element("code", path), _shown(value), _shown(info.default))
        if value == info.default:
            rest.append(row[:2])
        else:
            changed.append((*row, _origin(path, origins)))
    everything = element(
        "details",
        element("summary", f"{len(rest)} keys at their defaults"),
        table(("key", "value"), rest),
    )
    head = ("key", "value", "default", "written in")
    return joined(_arithmetic(record, plan), note, table(head, changed), everything)


def _arithmetic(record: RunRecord, plan: BatchPlan) -> Html:
    if record.config.trainer.stage != "rl":
        stage = record.config.trainer.stage
        return element("p", f"Stage {stage}: {plan.prompts} rows a step, one optimizer step each.")
    algorithm = record.config.algorithm.adv_estimator
    return element(
        "p",
        f"{algorithm}: {plan.prompts} prompts x {plan.samples_per_prompt} samples = "
        f"{plan.rollouts:,} rollouts a step, {plan.mini_batch_rollouts:,} of them for each of "
        f"{plan.optimizer_steps} optimizer step{_s(plan.optimizer_steps)}, sequences of at most "
        f"{plan.longest_sequence:,} tokens.",
    )


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _origin(path: str, origins: Mapping[str, str]) -> str:
    """Where a key, or something below it, was written."""
    below = [where for key, where in origins.items() if key.startswith(f"{path}.")]
    return origins.get(path) or ", ".join(dict.fromkeys(below)) or "not noted"


def _shown(value: Any) -> Html:
    return element("code", json.dumps(value, default=str, ensure_ascii=False))


def _value(record: RunRecord, path: str) -> Any:
    """The value of a key, with secrets masked."""
    return masked_tree(value_at(record.config, path), path.rpartition(".")[2])


def _is_unread(record: RunRecord) -> bool:
    if not record.directory.config.is_file():
        return True
    return any(one.file == record.directory.config.name for one in record.unread)


# Facts: versions, machine, inputs, digests, checkpoints, resumptions.


def digests_section(record: RunRecord) -> Html:
    """The head of the digest chain, which identifies the whole run."""
    try:
        lines = read_digests(record.directory.digests)
    except UserError as error:
        return missing(f"No chain of digests: {error.why}.")
    if not lines:
        return missing("The chain of digests has no line yet.")
    last = lines[-1]
    return joined(
        element("p", f"{len(lines)} lines; the chain after step {last.step} is"),
        element("pre", last.chain),
        element("p", "A run with the same chain did the same in every step, bit for bit."),
    )


def checkpoints_section(record: RunRecord) -> Html:
    """Table of the checkpoints."""
    rows: list[tuple[Child, ...]] = []
    for step, page in record.checkpoints.items():
        sizes = [entry.get("bytes", 0) for entry in page.get("files", {}).values()]
        facts = ", ".join(f"{name} {value}" for name, value in page.get("facts", {}).items())
        rows.append((str(step), f"{sum(sizes) / 1e6:,.1f} MB", facts))
    if not rows:
        return missing("There is no checkpoint.")
    return table(("step", "size", "noted"), rows)


def resumptions_section(run: RunDirectory) -> Html:
    """Table of the resumptions of the run."""
    try:
        entries = run.read_resumptions()
    except UserError as error:
        return missing(f"{run.resumptions.name}: {error.why}.")
    if not entries:
        return element("p", "The run was never resumed.")
    rows: list[tuple[Child, ...]] = [
        (
            entry["time"],
            "none" if entry["checkpoint"] is None else str(entry["checkpoint"]),
            "another" if entry["is_config_new"] else "the same",
            ", ".join(entry["changed"]) or "nothing",
            element("code", " ".join(entry["command"])),
        )
        for entry in entries
    ]
    head = ("time", "newest checkpoint", "configuration", "changed since the beginning", "command")
    return table(head, rows)


def facts_section(manifest: Mapping[str, Any]) -> Html:
    """Versions, machine and fingerprints, as the manifest has them."""
    blocks = ("versions", "hardware", "settings", "threads", "seeds", "datasets", "revision")
    rows: list[tuple[Child, ...]] = [
        (name, str(manifest[name])) for name in ("run_id", "created", "code") if name in manifest
    ]
    for block in blocks:
        entries = manifest.get(block)
        if isinstance(entries, Mapping):
            rows += [(f"{block}.{name}", str(value)) for name, value in entries.items()]
    rows.append(("command", element("code", " ".join(map(str, manifest.get("command", []))))))
    return joined(table(("fact", "value"), rows), _files(manifest), _packages(manifest))


def _files(manifest: Mapping[str, Any]) -> Html:
    files = manifest.get("files")
    if files is None:
        return missing("The content of files that keys name was not recorded.")
    rows: list[tuple[Child, ...]] = [
        (name, entry["path"], element("code", entry["fingerprint"]))
        for name, entry in files.items()
    ]
    return joined(element("h3", "Content of named files"), table(("key", "path", "hash"), rows))


def _packages(manifest: Mapping[str, Any]) -> Html | None:
    packages = manifest.get("packages")
    if not packages:
        return None
    listed = ", ".join(f"{name} {version}" for name, version in packages.items())
    return element(
        "details", element("summary", f"{len(packages)} more packages"), element("p", listed)
    )


FILE = "report.html"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy: the page loads nothing and runs no scripts."""


def write_report(root: Path, out: Path | None = None) -> Path:
    """Write the page about a run; a UserError where there is no run or its manifest is damaged."""
    record = read_run(root)
    place = out or record.directory.root / FILE
    text = page(record)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, text)
    except OSError as error:
        why = f"it cannot be written: {error.strerror or error}"
        raise UserError("--out", str(place), why, "give another file") from error
    return place


def page(record: RunRecord) -> str:
    """The page as text."""
    findings = diagnose(record)
    plan = plan_of(record)
    sections = {
        "Curves": curves_section(record),
        "Findings": findings_section(findings),
        "Plan": settings_section(record),
        "Reward": rewards_section(record),
        "Parity": parity_section(record),
        "Time": timing_section(record),
        "Samples": samples_section(record),
        "Digests": digests_section(record),
        "Checkpoints": checkpoints_section(record),
        "Resumptions": resumptions_section(record.directory),
        "Facts": facts_section(record.manifest),
    }
    total = plan.total_steps if plan is not None else None
    return _document(record.directory, joined(verdict(record, findings, total=total)), sections)


def _document(run: RunDirectory, top: Html, sections: dict[str, Html]) -> str:
    name = "/".join(run.root.resolve().parts[-2:])
    links = [element("a", title, href=f"#{title.lower()}") for title in sections]
    body = [
        element("section", element("h2", title), inner, id=title.lower(), class_="stack tight")
        for title, inner in sections.items()
    ]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", f"{name}: a run of Luyen"),
        element("style", Html(sheet())),
    )
    made = element("p", f"Made by Luyen {__version__} from {run.root}.", class_="dim")
    brand = element("span", "Luyen report", class_="brand")
    bar = element("header", brand, element("nav", *links), class_="bar")
    heading = element("div", element("h1", name), made)
    inner = element("body", bar, element("main", heading, top, *body, class_="stack"))
    return f"<!doctype html>\n{element('html', head, inner, lang='en')}\n"
