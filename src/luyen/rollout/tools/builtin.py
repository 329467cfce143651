"""Tools that come with the package, by the name under which a tool file asks for them."""

from collections.abc import Callable

from luyen.base.registry import Registry
from luyen.rollout.tools.protocol import Tool

builtin_tools: Registry[Callable[..., Tool]] = Registry("built-in tool", "tools[].builtin")
"""Makes the tool; keyword arguments come from `config` beside the name."""
