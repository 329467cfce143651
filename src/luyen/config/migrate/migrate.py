"""`migrate`: apply the rules of a tool to its keys, and take out what `check` refuses.

The rules of `check` are the one source of what a configuration may say. A key that they refuse, or
call without effect, is taken out of the draft, and their reason becomes the key's row in the table.
"""

from collections.abc import Callable
from dataclasses import replace

from luyen.config.check import Report, check_tree
from luyen.config.loader.load import load_trees
from luyen.config.loader.tree import ConfigTree
from luyen.config.machine import Machine
from luyen.config.migrate import axolotl, llama_factory, trl, verl
from luyen.config.migrate.reader import MigrationRequest, read_source
from luyen.config.migrate.report import Entry, Migration, SourceConfig, by_hand, keep
from luyen.config.problem import COMMAND_LINE, Problem

ABSENT = (
    *("D01", "D02", "D05", "D12", "M01", "M06", "R02", "R23", "S01", "S03", "S06", "S14", "S23"),
    *("T05", "T12", "T13", "W12", "W15", "Z01"),
)
"""Rules about files, models, packages and devices, which another machine may have."""
WITHOUT_EFFECT = (
    *(
        "A07",
        "B07",
        "B10",
        "D08",
        "D09",
        "D11",
        "E04",
        "F06",
        "H03",
        "J03",
        "K04",
        "K07",
        "L02",
        "L04",
    ),
    *("L06", "L08", "M03", "O05", "O08", "R07", "R08", "R13", "R17", "R19", "R25", "R33", "S11"),
    *("S18", "S20", "S21", "S25", "T06", "W07", "W10", "Y04", "Y05", "Y07", "Y09", "Y10"),
)
"""Rules about keys that change nothing in the configuration they are in."""
_ROOM = ("B05", "B08", "B09", "R03", "R10", "E03")
"""Rules about limits that the longest sequence has to fit."""
_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model.path"
_GIB = 1024**3
_CLUSTER = Machine(cpus=64, ram_bytes=1024 * _GIB, gpu_bytes=(80 * _GIB,) * 64, is_assumed=True)
"""A draft is checked as on a machine with everything, so that it is the same on every machine."""
_MOST_ROUNDS = 100
_ENTRIES: dict[str, Callable[[SourceConfig], list[Entry]]] = {
    module.TOOL: module.entries for module in (axolotl, llama_factory, trl, verl)
}
"""Tool -> what becomes of each of its keys."""


def migrate(request: MigrationRequest) -> Migration:
    """Our configuration with the account of every key; a UserError for what is of no tool."""
    source = read_source(request)
    entries = _with_model(_ENTRIES[source.tool](source))
    draft = Migration(tool=source.tool, where=source.where, entries=tuple(entries))
    return accepted(draft)


def _with_model(entries: list[Entry]) -> list[Entry]:
    """The entries, with one more where nothing says which model is trained."""
    is_said = any(_MODEL in entry.outcome.keys for entry in entries)
    is_named = any(entry.outcome.is_open and "model" in entry.source for entry in entries)
    if is_said or is_named:
        return entries
    why = f"no model is named: set {_MODEL}, or the built-in model is trained"
    return [*entries, Entry(source="model", value=None, outcome=by_hand(why))]


def check_draft(migration: Migration) -> Report:
    """What `check` says of it on a machine that has all devices and packages."""
    origins = dict.fromkeys(migration.keys, COMMAND_LINE)
    tree = load_trees([ConfigTree(values=migration.values, origins=origins)])
    return check_tree(
        tree, machine=_CLUSTER, installed=lambda _: True, versions=_any, starts_a_run=False
    )


def _any(package: str) -> None:
    del package


def accepted(draft: Migration) -> Migration:
    """The draft without what `check` refuses or calls without effect; the table says why."""
    for _ in range(_MOST_ROUNDS):
        report = check_draft(draft)
        found = next((p for p in report.problems if _is_handled(p, draft)), None)
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


def _is_handled(problem: Problem, draft: Migration) -> bool:
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
