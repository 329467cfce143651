"""How a command ends: with a code of its own, and never with one that foreign code chose."""

import asyncio
from typing import Any, final

from typer.core import TyperGroup

from luyen.base.errors import UserError
from luyen.base.faults import last_line


@final
class Commands(TyperGroup):
    """The table of commands. None of them raises SystemExit: who does was called by one.

    Most foreign code is caught where it is called. What is left are its own tasks and threads, and
    what runs inside libraries. Exit code 0 would say that the command did what it was asked to.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a UserError where something inside it wanted to end the process."""
        try:
            return super().invoke(ctx)
        except (SystemExit, GeneratorExit, asyncio.CancelledError) as fault:
            why = f"code inside the command ended it: {last_line(fault)}"
            fix = "mend what calls it: a reward, a plugin, a tool, an environment"
            raise UserError("command", ctx.invoked_subcommand, why, fix) from fault
