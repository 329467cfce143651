"""Run every attack and print what got through, as JSON; a process of its own for other settings."""

import asyncio
import json
import sys

from luyen.sandbox.attacks import ATTACKS, breaches, target
from luyen.sandbox.launch import available


async def attacked() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for attack in ATTACKS:
        with target() as outside:
            found[attack.name] = await breaches(attack, outside)
    return found


if __name__ == "__main__":
    json.dump({"walls": available(), "breaches": asyncio.run(attacked())}, sys.stdout)
