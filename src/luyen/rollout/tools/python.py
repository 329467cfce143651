"""Python code that the policy writes, run in the sandbox."""

from typing import Any

from luyen.base.errors import UserError
from luyen.base.suggest import did_you_mean
from luyen.rollout.tools.builtin import builtin_tools
from luyen.rollout.tools.foreign import ToolError
from luyen.rollout.tools.function import FunctionTool
from luyen.sandbox.limits import Limits
from luyen.sandbox.python import Ran, run_python

_SPARE_S = 20.0
"""Time of a call beyond that of its program, so that the sandbox is the one that ends it."""
_LAST = 2000
"""Characters of standard error that are shown: the end of a traceback says most."""


@builtin_tools.register("python")
def python_tool(*, name: str = "python", **limits: Any) -> FunctionTool:
    """The tool; `limits` are fields of `luyen.sandbox.limits.Limits`."""
    known = Limits.__slots__
    for given in limits:
        if given not in known:
            raise UserError(
                "config", given, "the sandbox has no such limit", did_you_mean(given, known)
            )
    held = Limits(**limits)

    async def python(code: str) -> str:
        """Run Python code and read what it prints and the value of its last line.

        Args:
            code: A whole program. Nothing is kept between calls.
        """
        return said(await run_python(code, limits=held))

    own = {"timeout_s": held.wall_s + _SPARE_S, "concurrency": 8}
    return FunctionTool(python, name=name, limits=own)


def said(ran: Ran) -> str:
    """What the policy reads about a program; ToolError when it was killed.

    An exception inside the program is a result like any other: its traceback is shown.
    """
    if ran.killed_for is not None or ran.timed_out:
        raise ToolError(f"the program was ended: it went over its limit of {ran.killed_for}")
    parts = [ran.stdout.rstrip("\n"), ran.value or ""]
    if ran.exit_code != 0:
        parts.append(ran.stderr.strip()[-_LAST:] or f"exit code {ran.exit_code}")
    return "\n".join(part for part in parts if part) or "(no output)"
