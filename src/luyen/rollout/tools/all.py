"""Everything that registers a built-in tool is imported here."""

from luyen.rollout.tools import calculator, python, search
from luyen.rollout.tools.builtin import builtin_tools

__all__ = ["builtin_tools", "calculator", "python", "search"]
