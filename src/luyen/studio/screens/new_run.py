"""The form of a new run: schema, recipes, and the findings of `check` on a text."""

import json
import re
import shlex
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from luyen.base.errors import UserError
from luyen.base.secrets import masked
from luyen.config.check import batch_lines, check, offline_lines
from luyen.config.explain import json_schema
from luyen.config.fields import all_fields
from luyen.config.machine import this_machine
from luyen.data.first_rows import first_row_error
from luyen.sandbox.launch import missing
from luyen.studio.screens.records import finding_json, memory_bars, problem_json

_MOST_YAML = 2**20
_PIPELINE = re.compile(r"^stages:", re.MULTILINE)
_PATH = re.compile(r"(?P<before>(?:- |: |\[|, ))(?P<path>[\w./-]+\.\w+)")


def schema_page() -> dict[str, Any]:
    """The JSON schema, and the documentation of every key."""
    keys = [
        {
            "key": info.path,
            "kind": info.kind,
            "default": info.default,
            "help": info.doc,
            "choices": list(info.choices),
            "required": info.required,
            "derived": info.derived,
        }
        for info in all_fields().values()
        if info.awaits is None
    ]
    return {"schema": json_schema(), "keys": keys}


def recipes() -> list[dict[str, str]]:
    """Configurations to begin with: those of the package, and those of a checkout."""
    home = Path(str(resources.files("luyen")))
    folders = (home / "builtin", home.parents[1] / "recipes")
    files = {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}
    found: list[dict[str, str]] = []
    for name, file in sorted(files.items(), key=lambda pair: (pair[0] != "quickstart", pair[0])):
        text = _with_whole_paths(file.read_text(), file.parent)
        if _PIPELINE.search(text):  # several runs, and the form is of one
            continue
        first = text.partition("\n")[0]
        title = first.removeprefix("#").strip() if first.startswith("#") else name
        found.append({"name": name, "title": title, "yaml": text})
    return found


def _with_whole_paths(text: str, folder: Path) -> str:
    """The same with absolute paths: a copy elsewhere would look for its files in its own folder."""

    def whole(found: re.Match[str]) -> str:
        place = folder / found["path"]
        return found["before"] + (str(place.resolve()) if place.is_file() else found["path"])

    return _PATH.sub(whole, text)


def check_text(text: str, overrides: Sequence[str]) -> dict[str, Any]:
    """What `luyen check` finds in a configuration, by the same code."""
    if len(text) > _MOST_YAML:
        raise UserError("yaml", f"{len(text):,} characters", "it is too long", "send less")
    with tempfile.TemporaryDirectory(prefix="luyen-studio-") as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(text)
        try:
            report = check([file], list(overrides), machine=this_machine(),
                           missing_promises=missing, row_error=first_row_error)  # fmt: skip
        except UserError as error:
            gone = finding_json("error", error.field, error.why, error.fix)
            return {"ok": False, "findings": [gone], "plan": {"lines": [], "memory": []},
                    "yaml": text, "command": "luyen train run.yaml"}  # fmt: skip
    findings = [problem_json(one) for one in report.problems]
    for one in findings:
        one["origin"] = one["origin"].replace(str(file), "run.yaml")
    plan = report.plan
    is_online = report.config.trainer.stage == "rl"
    lines = (batch_lines if is_online else offline_lines)(plan.batch) if report.is_whole else []
    words = " ".join(["luyen train run.yaml", *(shlex.quote(masked(word)) for word in overrides)])
    return {
        "ok": report.is_sound,
        "findings": findings,
        "plan": {
            "lines": [f"{label}: {value}" for label, value in lines],
            "memory": memory_bars(plan.memory),
        },
        "yaml": text,
        "command": words,
        "config": json.loads(json.dumps(_plain(report.config.model_dump()), default=str)),
    }


def _plain(value: Any) -> Any:
    from luyen.base.secrets import masked_tree

    return masked_tree(value)
