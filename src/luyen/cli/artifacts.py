"""`luyen artifacts`: list, show, verify and re-index the inputs and outputs of runs."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, final

import typer
from typer.core import TyperGroup

from luyen.base.errors import UserError
from luyen.base.files import plain
from luyen.cli.runs import table

if TYPE_CHECKING:
    from luyen.telemetry.artifact_registry import ArtifactRegistry
    from luyen.telemetry.artifacts import Artifact

_HEAD = ("kind", "name", "hash", "made from", "run", "when")
_NOTES = 5
"""Damaged lines that are named."""
_DEEPEST = 50
"""Generations that are shown; a bound against forged cycles."""


def run_list(folder: Path, *, as_json: bool) -> int:
    """Print the recorded artifacts, each once."""
    found = _once(_registry(folder))
    if as_json:
        typer.echo(_json([_page(one) for one in found]))
        return 0
    rows = [_row(one) for one in found]
    for line in table(_HEAD, rows) if rows else [f"No artifacts in {folder}"]:
        typer.echo(line)
    return 0


def run_verify(folder: Path, *, as_json: bool) -> int:
    """Hash all files and verify all lists; 1 when something differs from the record."""
    from luyen.telemetry.artifacts import difference

    registry = _registry(folder)
    present = [one for one in _once(registry) if one.files and not one.is_retired]
    damaged = registry.damage()
    wrong = [(one, how) for one in present if (how := difference(one)) is not None]
    if as_json:
        changed = [{**_page(one), "why": how} for one, how in wrong]
        page = {"verified": len(present), "changed": changed, "damaged_lists": damaged}
        typer.echo(_json(page))
    else:
        for file, how in damaged.items():
            typer.secho(f"{file}: {how}", fg="red")
        for one, how in wrong:
            typer.secho(f"{one.kind} {one.title}: {how}", fg="red")
        count = f"{len(present)} artifact{'' if len(present) == 1 else 's'}"
        typer.echo(f"{count} hashed, {len(wrong)} not as noted")
    return 1 if wrong or damaged else 0


def run_show(name: str, folder: Path, *, as_json: bool) -> int:
    """Print every matching artifact with its ancestors."""
    registry = _registry(folder)
    found = registry.find(name)
    if not found:
        registry.one(name, "NAME")  # raises the UserError with suggestions
    if as_json:
        typer.echo(_json([_tree(registry, one, _DEEPEST) for one in found]))
        return 0
    for one in found:
        for line in _branch(registry, one, "", _DEEPEST):
            typer.echo(line)
    return 0


def run_rebuild(folder: Path) -> int:
    """Rewrite the index and print its length."""
    registry = _registry(folder)
    count = registry.rebuild()
    typer.echo(f"{count} line{'' if count == 1 else 's'} in {registry.root / 'artifacts.jsonl'}")
    return 0


def _registry(folder: Path) -> "ArtifactRegistry":
    from luyen.telemetry.artifact_registry import ArtifactRegistry

    root = folder.expanduser()
    if not root.is_dir():
        fix = "give the folder that trainer.default_local_dir names"
        raise UserError("DIR", str(folder), "no such folder", fix)
    registry = ArtifactRegistry(root)
    for wrong in registry.skipped[:_NOTES]:
        typer.secho(f"note: {wrong}: left out", fg="yellow", err=True)
    more = len(registry.skipped) - _NOTES
    if more > 0:
        typer.secho(f"note: {more} more damaged lines are left out", fg="yellow", err=True)
    return registry


def _once(registry: "ArtifactRegistry") -> "list[Artifact]":
    """Each content at each path once, the record of its producer preferred, by time."""
    made = {one.hash for one in registry.artifacts if one.used_as is None}
    found: dict[tuple[str, str], Artifact] = {}
    for one in registry.artifacts:
        if one.used_as is None or one.hash not in made:
            found.setdefault((one.hash, one.path), one)
    return sorted(found.values(), key=lambda one: (one.made, one.used_as is None))


def _row(one: "Artifact") -> tuple[str, ...]:
    from luyen.telemetry.artifacts import short

    parents = " ".join(map(short, one.parents)) or "-"
    kind = f"{one.kind} (retired)" if one.is_retired else one.kind
    return (kind, one.name, short(one.hash), parents, one.run, one.made.replace("T", " ")[:16])


def _branch(registry: "ArtifactRegistry", one: "Artifact", indent: str, left: int) -> Iterator[str]:
    from luyen.telemetry.artifacts import short

    made = f"read by {one.run}" if one.used_as is not None else f"made by {one.run}"
    where = "" if one.path == one.name else f"  {_from_here(one.path)}"
    yield f"{indent}{one.kind} {one.title}  {made}{where}"
    if left == 0:
        return
    for parent in one.parents:
        above = registry.maker(parent)
        if above is None:
            yield f"{indent}  {short(parent)}  nothing is noted of it"
        else:
            yield from _branch(registry, above, f"{indent}  ", left - 1)


def _from_here(path: str) -> str:
    """A path below the folder of the command without that folder."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _tree(registry: "ArtifactRegistry", one: "Artifact", left: int) -> dict[str, Any]:
    above = [registry.maker(parent) for parent in one.parents] if left else []
    known = [_tree(registry, parent, left - 1) for parent in above if parent is not None]
    return {**_page(one), "made_from": known}


def _page(one: "Artifact") -> dict[str, Any]:
    return {**asdict(one), "files": dict(one.files)}


def _json(value: Any) -> str:
    return json.dumps(plain(value), indent=2)


# The commands below `luyen artifacts`; without one of their names, `list` is meant.


@final
class ListUnlessNamed(TyperGroup):
    """`luyen artifacts DIR` is `luyen artifacts list DIR`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `list` in front of anything that is neither a command nor a call for help."""
        is_named = bool(args) and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if is_named else ["list", *args])


artifacts = typer.Typer(
    cls=ListUnlessNamed,
    help="What runs read and made, known by content.",
    rich_markup_mode=None,
)
_RUNS = Path("runs")
Folder = Annotated[Path, typer.Argument(help="The folder of runs.", metavar="[DIR]")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@artifacts.command("list")
def list_artifacts(folder: Folder = _RUNS, as_json: AsJson = False) -> None:
    """List rows, models, checkpoints and exports with their hashes and parents."""
    raise typer.Exit(run_list(folder, as_json=as_json))


@artifacts.command()
def verify(folder: Folder = _RUNS, as_json: AsJson = False) -> None:
    """Hash every file again; exit code 1 when one has changed or is missing."""
    raise typer.Exit(run_verify(folder, as_json=as_json))


@artifacts.command()
def show(
    name: Annotated[str, typer.Argument(help="A name, NAME@HASH, or the beginning of a hash.")],
    folder: Folder = _RUNS,
    as_json: AsJson = False,
) -> None:
    """Show what an artifact was made from, back to rows and models that no run made."""
    raise typer.Exit(run_show(name, folder, as_json=as_json))


@artifacts.command()
def rebuild(folder: Folder = _RUNS) -> None:
    """Rebuild the index of a folder from its run directories."""
    raise typer.Exit(run_rebuild(folder))
