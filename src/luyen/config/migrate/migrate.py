"""`migrate`: find out which tool a file is of, apply its rules, and take out what `check` refuses.

The rules of `check` are the one source of what a configuration may say. A key that they refuse, or
call without effect, is taken out of the draft, and their reason becomes the key's row in the table.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.input_files import is_directory, is_file, read_text
from luyen.config.check import Report, check_tree, is_installed
from luyen.config.loader.load import load_trees
from luyen.config.loader.tree import ConfigTree
from luyen.config.loader.yaml_tree import read_tree
from luyen.config.machine import Machine
from luyen.config.migrate import axolotl, llama_factory, trl, verl
from luyen.config.migrate.common import placing
from luyen.config.migrate.report import Entry, Migration, Source, keep
from luyen.config.migrate.shell import command_words, is_script
from luyen.config.problem import COMMAND_LINE, Problem

ABSENT = (
    *("D01", "D02", "D05", "D12", "M01", "M06", "R02", "R23", "S01", "S03", "S06", "S14", "S23"),
    *("T05", "T12", "T13", "W12", "W15", "Z01"),
)
"""Rules about files, models, packages and devices, which another machine may have."""
WITHOUT_EFFECT = (
    *("A07", "B07", "B10", "D08", "D09", "D11", "E04", "H03", "J03", "K04", "K07", "L02", "L04"),
    *("L06", "L08", "M03", "O05", "O08", "R07", "R08", "R13", "R17", "R19", "R25", "S11", "S18"),
    *("S20", "S21", "S25", "T06", "W07", "W10", "Y04", "Y05", "Y07", "Y09", "Y10"),
)
"""Rules about keys that change nothing in the configuration they are in."""
_ROOM = ("B05", "B08", "B09", "R03", "R10", "E03")
"""Rules about limits that the longest sequence has to fit."""
_ACTOR = "actor_rollout_ref.actor"
_GIB = 1024**3
_CLUSTER = Machine(cpus=64, ram_bytes=1024 * _GIB, gpu_bytes=(80 * _GIB,) * 64, is_assumed=True)
"""A draft is checked as on a machine with everything, so that it is the same on every machine."""
_MOST_ROUNDS = 100


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to migrate, and for where.

    Example:
        >>> Request(text="python -m verl.trainer.main_ppo trainer.nnodes=2").devices
        1
    """

    text: str
    """Path of a file, or a command."""
    output: Path | None = None
    """File that will hold the result: relative paths in it start from its folder."""
    devices: int = 1
    """Devices that it ran on, for tools whose sizes are for one device."""
    installed: Callable[[str], bool] = is_installed
    """Whether a Python package is installed."""


def migrate(request: Request) -> Migration:
    """Our configuration with the account of every key; a UserError for what is of no tool."""
    source, entries = _read(request)
    draft = Migration(tool=source.tool, where=source.where, entries=tuple(entries))
    return settle(draft)


def check_draft(migration: Migration) -> Report:
    """What `check` says of it on a machine that has all devices and packages."""
    origins = dict.fromkeys(migration.keys, COMMAND_LINE)
    tree = load_trees([ConfigTree(values=migration.values, origins=origins)])
    return check_tree(
        tree, machine=_CLUSTER, installed=lambda _: True, versions=_any, starts_a_run=False
    )


def _any(package: str) -> None:
    del package


def settle(draft: Migration) -> Migration:
    """The draft without what `check` refuses or calls without effect; the table says why."""
    for _ in range(_MOST_ROUNDS):
        report = check_draft(draft)
        found = next((p for p in report.problems if _is_settled(p, draft)), None)
        if found is None:
            return _without_empty(draft)
        if found.id in _ROOM and not _is_written(found.field, draft):
            data = report.config.data
            longest = data.max_prompt_length + data.max_response_length
            draft = _with_room(draft, found.field, longest)
        else:
            draft = _taken_out(draft, found)
    return _without_empty(draft)


def _is_written(key: str, draft: Migration) -> bool:
    return key in draft.keys


def _is_settled(problem: Problem, draft: Migration) -> bool:
    """Whether something is to be done about a finding."""
    if problem.id in ABSENT or (problem.id in _ROOM and problem.severity != "error"):
        return False
    if problem.id in _ROOM:
        return True
    wanted = problem.severity == "error" or problem.id in WITHOUT_EFFECT
    return wanted and _is_written(_field_of(problem), draft)


def _field_of(problem: Problem) -> str:
    """The key to take out: without a size for counted micro-batches, the counting."""
    return f"{_ACTOR}.use_dynamic_bsz" if problem.id == "B06" else problem.field


def _taken_out(draft: Migration, problem: Problem) -> Migration:
    is_implied = problem.id in WITHOUT_EFFECT
    note = problem.why if is_implied else f"{problem.why}: {problem.fix}"
    return draft.without(_field_of(problem), note=note, is_implied=is_implied)


def _with_room(draft: Migration, key: str, longest: int) -> Migration:
    outcome = keep({key: longest}, "the longest sequence")
    entry = Entry(source="longest sequence", value=longest, outcome=outcome, is_default=True)
    return replace(draft, entries=(*draft.entries, entry))


def _without_empty(draft: Migration) -> Migration:
    """The draft without defaults of the tool that set nothing, unless they tell something."""
    kept = [
        entry
        for entry in draft.entries
        if not entry.is_default or entry.outcome.keys or entry.outcome.is_implied
    ]
    return replace(draft, entries=tuple(kept))


# Which tool a file is of.


def _read(request: Request) -> tuple[Source, list[Entry]]:
    text = request.text.strip()
    if is_directory(text):
        raise UserError("source", text, "it is a folder", "give the file that starts training")
    if is_file(text):
        return _read_file(Path(text).expanduser(), request)
    if "=" not in text and " " not in text:
        raise UserError("source", text, "no such file", "give a file, or a command in quotes")
    source = _source("the command", Path.cwd(), request)
    return _read_command(command_words(text), source)


def _source(where: str, folder: Path, request: Request) -> Source:
    # Paths of all four tools start from the folder that they are started in.
    here = Path.cwd()
    output = here if request.output is None else request.output.absolute().parent
    return Source(
        tool="",
        where=where,
        method="",
        values={},
        devices=request.devices,
        installed=request.installed,
        place=placing(here, output),
        folder=str(folder if folder != here else here),
    )


def _read_file(path: Path, request: Request) -> tuple[Source, list[Entry]]:
    text = read_text(path)
    source = _source(path.name, path.absolute().parent, request)
    if path.suffix == ".py":
        found = trl.read_python(text, source, str(path))
        return found, trl.entries(found)
    if path.suffix in (".yaml", ".yml", ".json"):
        return _read_values(_yaml(text, path), source, hint=f"{path.parent.name} {path.stem}")
    return _read_command(command_words(text), source)


def _yaml(text: str, path: Path) -> dict[str, Any]:
    tree = read_tree(text, str(path))
    wrong = [problem for problem in tree.problems if problem.id == "C001"]
    if wrong:
        raise UserError(str(wrong[0].origin), path.name, wrong[0].why, wrong[0].fix)
    return tree.values


def _read_values(
    values: Mapping[str, Any], source: Source, *, hint: str
) -> tuple[Source, list[Entry]]:
    """A YAML file: its keys say whose it is."""
    if axolotl.is_axolotl(values):
        found = axolotl.read_yaml(values, source)
        return found, axolotl.entries(found)
    if llama_factory.is_llama_factory(values):
        found = llama_factory.read_yaml(values, source)
        return found, llama_factory.entries(found)
    if verl.is_verl(values):
        found = verl.read_yaml(values, source)
        return found, verl.entries(found)
    if trl.is_trl(values):
        found = trl.read_yaml(values, source, hint)
        return found, trl.entries(found)
    why = "its keys are those of neither verl, TRL, LLaMA-Factory nor Axolotl"
    raise UserError("source", source.where, why, "give the file that a run is started with")


def _read_command(words: Sequence[str], source: Source) -> tuple[Source, list[Entry]]:
    """A command: of verl with its overrides, or of another tool with its file and options."""
    text = " ".join(words)
    is_other = re.search(r"\b(llamafactory-cli|axolotl|trl)\b", text) is not None
    if not is_other and not is_script(list(words)):
        found = verl.read_words(words, source)
        return found, verl.entries(found)
    options = trl.read_options(words)
    config = options.pop("config", None)
    files = [word for word in words if word.endswith((".yaml", ".yml")) and is_file(word)]
    named = str(config) if config is not None else next(iter(files), None)
    values: dict[str, Any] = {}
    if named is not None:
        values = _yaml(read_text(Path(named)), Path(named))
    for word in words:
        key, equals, raw = word.partition("=")
        if equals and re.fullmatch(r"\w+", key):
            values[key] = read_tree(f"value: {raw}", "command").values.get("value", raw)
    return _read_values({**values, **options}, source, hint=text)
