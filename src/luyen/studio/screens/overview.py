"""The overview of a run: verdict, findings, headline numbers, time by phase, commands."""

import json
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from luyen.base.errors import UserError
from luyen.studio.screens.folder import KnownRun
from luyen.studio.screens.metric_table import MetricColumns
from luyen.studio.screens.server_cache import Studio

_WAIT_S = 0.4
"""Seconds that a request waits for the doctor."""

HEADLINE: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("reward", "reward", "", ("reward/mean",)),
    ("validation", "validation", "", ("val/accuracy", "sft/val_nll", "preference/val_accuracy",
     "reward_model/val_accuracy", "distill/val_divergence")),
    ("loss", "loss", "", ("sft/nll", "preference/loss", "reward_model/loss",
     "distill/divergence")),
    ("length", "response length", "tokens", ("response_length/mean",)),
    ("truncation", "cut answers", "share", ("response_length/cut_fraction",)),
    ("entropy", "entropy", "nats", ("actor/entropy",)),
    ("kl", "KL", "nats", ("actor/ref_kl", "actor/kl_loss", "actor/ppo_kl")),
    ("gap", "gap of trainer and sampler", "nats", ("parity/mean_gap", "parity/max_gap")),
    ("grad_norm", "gradient norm", "", ("actor/grad_norm", "sft/grad_norm", "critic/grad_norm")),
    ("staleness", "staleness", "versions", ("async/staleness_mean",)),
    ("throughput", "throughput", "tokens/s", ("time/tokens_per_s",)),
)  # fmt: skip
"""Key, label, unit, and the metrics of which the first that a run has is shown."""
COLLAPSE = frozenset(
    ("reward-all-equal", "all-cut-and-alike", "not-finite", "entropy-collapse", "entropy-blow-up",
     "kl-runaway", "length-explosion", "frozen-parameters", "value-loss-explosion")
)  # fmt: skip
"""Findings after which a run learns nothing more."""
_PHASES = ("generate", "score", "log-probs", "advantages", "update", "publish", "digest",
           "validate", "save")  # fmt: skip
_FACTS = ("run_id", "created", "versions", "hardware", "seeds", "rows", "revision", "command",
          "folder")  # fmt: skip


def overview(studio: Studio, run_id: str) -> dict[str, Any]:
    """Everything of the first screen of a run."""
    known = studio.folder.get(run_id, is_read=False)
    empty = {"verdict": _unknown(known.row["problem"] or ""), "findings": [], "headline": [],
             "time": [], "manifest": {}, "commands": {}, "pending": False,
             "damage": [{"file": "", "message": known.row["problem"]}]}  # fmt: skip
    if known.problem is not None:
        return {**known.row, **empty}
    table = studio.table(known)
    if known.row["state"] == "damaged":
        return {**known.row, **empty, "headline": headline(table), "time": phases(table)}
    found = diagnosis(studio, known)
    return {
        **known.row,
        **found,
        "headline": headline(table),
        "time": phases(table),
        "manifest": _manifest(known),
        "commands": commands(known),
    }


def diagnosis(studio: Studio, known: KnownRun) -> dict[str, Any]:
    """Verdict, findings and damage by the doctor; `pending` while it reads.

    The verdict of a run that goes on may be a few steps old; that of one that ended is not.
    """
    state = known.row["state"]
    try:
        facts = known.directory.metrics.stat()
        key: object = facts.st_ino, facts.st_size, state
    except OSError:
        key = state
    has_ended = state != "running"
    found, is_current = studio.diagnoses.get(
        known.id,
        key,
        lambda: _diagnosed(studio, known.directory.root),
        wait_s=_WAIT_S,
        is_urgent=has_ended,
    )
    if found is not None:
        return {**found, "pending": has_ended and not is_current}
    verdict = {"level": "unknown", "sentence": "The doctor is still reading the run."}
    return {"verdict": verdict, "findings": [], "damage": [], "pending": True}


_DIAGNOSE = (
    "import json, sys; from luyen.studio.screens.overview import diagnose_run; "
    "json.dump(diagnose_run(sys.argv[1]), sys.stdout, default=str)"
)


def _diagnosed(studio: Studio, root: Path) -> dict[str, Any]:
    """What the doctor says, in a process of its own: its memory does not stay in the server."""
    # -P: a module in the folder in which the studio was started is not imported.
    done = studio.run_process([sys.executable, "-P", "-c", _DIAGNOSE, str(root)])
    try:
        return json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or [f"it ended with code {done.returncode}"]
        return {"verdict": _unknown(last[0][:300]), "findings": [], "damage": []}


def diagnose_run(root: str) -> dict[str, Any]:
    """Verdict, findings and damage of a run."""
    # Imported here: rules load the whole configuration, and the list of runs needs none of it.
    from luyen.studio.doctor.diagnose import diagnose
    from luyen.studio.doctor.record import read_run
    from luyen.studio.runs import damage_of

    try:
        record = read_run(root)
        findings = diagnose(record)
        damage = [{"file": one.file, "message": one.why} for one in record.damaged()]
    except (UserError, OSError) as error:
        why = damage_of(error) if isinstance(error, UserError) else str(error)
        return {"verdict": _unknown(why), "findings": [], "damage": []}
    shown = [
        {
            "rule": one.rule,
            "level": one.severity,
            "message": one.symptom.says,
            "title": one.title,
            "step": one.symptom.steps[-1] if one.symptom.steps else None,
            "steps": list(one.symptom.steps[:100]),
            "evidence": dict(one.symptom.numbers),
            "rollouts": list(one.symptom.rollouts[:20]),
            "fix": one.symptom.experiment.change,
            "then": list(one.symptom.experiment.then),
        }
        for one in findings
    ]
    lost = next((one for one in damage if one["file"] == record.directory.metrics.name), None)
    verdict = _verdict(shown, len(record.steps))
    if lost is not None and not record.steps:
        verdict = _unknown(f"{lost['file']}: {lost['message']}")
    return {"verdict": verdict, "findings": shown, "damage": damage}


def _verdict(findings: list[dict[str, Any]], steps: int) -> dict[str, str]:
    bad = [one for one in findings if one["level"] != "note"]
    if steps == 0:
        return {"level": "unknown", "sentence": "The run has not finished a step."}
    if not bad:
        return {"level": "healthy", "sentence": "The doctor finds nothing wrong."}
    collapse = [one for one in bad if one["rule"] in COLLAPSE]
    counts = Counter(one["level"] for one in bad)
    listed = " and ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in counts.items())
    worst = (collapse or bad)[0]["message"]
    return {"level": "collapsed" if collapse else "degraded", "sentence": f"{listed}: {worst}"}


def _unknown(why: str) -> dict[str, str]:
    return {"level": "unknown", "sentence": f"The run cannot be judged: {why}"}


def headline(table: MetricColumns) -> list[dict[str, Any]]:
    """The numbers that matter, each by the first of its metrics that the run has."""
    last = dict(table.last)
    validation = sorted(name for name in last if name.startswith("val/reward/mean@"))
    found: list[dict[str, Any]] = []
    for key, label, unit, names in HEADLINE:
        known = (*names[:1], *validation, *names[1:]) if key == "validation" else names
        name = next((one for one in known if one in last), None)
        if name is not None:
            entry = {"key": key, "label": label, "name": name, "last": last[name], "unit": unit}
            found.append(entry)
    return found


def phases(table: MetricColumns) -> list[dict[str, Any]]:
    """Total seconds of each phase, and their shares."""
    spent: dict[str, float] = {}
    for phase in _PHASES:
        curve = table.curve(f"time/{phase}", points=1 << 30)
        values = [value for value in curve.value if value is not None]
        if values:
            spent[phase] = sum(values) * table.rows_per_point
    whole = sum(spent.values()) or 1.0
    ordered = sorted(spent.items(), key=lambda pair: -pair[1])
    return [{"phase": name, "seconds": s, "share": s / whole} for name, s in ordered]


def _manifest(known: KnownRun) -> dict[str, Any]:
    try:
        manifest = known.directory.read_manifest()
    except UserError as error:
        return {"problem": error.why}
    return {name: manifest[name] for name in _FACTS if name in manifest}


def commands(known: KnownRun) -> dict[str, str]:
    """Commands about the run, to copy."""
    place = shlex.quote(str(known.directory.root))
    step = max(known.row["step"], 1)
    return {
        "resume": f"luyen train --resume {place}",
        "eval": f"luyen eval {place}",
        "serve": f"luyen serve {place}",
        "export": f"luyen export {place} {shlex.quote(known.row['name'] + '-export')}",
        "report": f"luyen report {place}",
        "reproduce": f"luyen reproduce {place}",
        "replay": f"luyen replay {place} --step {step}",
    }
