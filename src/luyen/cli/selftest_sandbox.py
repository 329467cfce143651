"""`luyen selftest --sandbox`: the walls of this machine, and every attack on them."""

import asyncio
import json
from typing import Any

import typer

from luyen.sandbox.attacks import ATTACKS, breaches, target
from luyen.sandbox.limits import WALLS, available, missing

_COLOURS = {"kept": "green", "not kept": "yellow", "held": "green", "BROKEN": "red"}


def run_sandbox_selftest(*, as_json: bool) -> int:
    """Print walls, promises and attacks; 1 when an attack breaks a promise that is kept here."""
    walls, lost = available(), set(missing())
    if not as_json:
        typer.echo(f"walls: {', '.join(walls)}")
        for promise in WALLS:
            _line("not kept" if promise in lost else "kept", promise)
    found: list[dict[str, Any]] = []
    for attack in ATTACKS:
        with target() as outside:
            got = asyncio.run(breaches(attack, outside))
        found.append({"attack": attack.name, "promise": attack.promise, "breaches": got})
        if not as_json:
            _line("BROKEN" if got else "held", f"{attack.promise}: {attack.name}")
            for line in got:
                typer.echo(f"           {line}")
    broken = [one for one in found if one["breaches"] and one["promise"] not in lost]
    if as_json:
        page = {"ok": not broken, "walls": walls, "missing": sorted(lost), "attacks": found}
        typer.echo(json.dumps(page, indent=2))
    else:
        through = sum(bool(one["breaches"]) for one in found)
        typer.echo(f"{len(found)} attacks: {through} got through, {len(lost)} promises not kept")
    return 1 if broken else 0


def _line(state: str, text: str) -> None:
    typer.echo(f"{typer.style(f'{state:9s}', fg=_COLOURS[state])}  {text}")
