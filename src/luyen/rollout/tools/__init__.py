"""Tools that a policy may call."""

from luyen.rollout.tools.protocol import ToolReply
from luyen.rollout.tools.python_tools import tool, tool_class
from luyen.rollout.tools.rollout_tools import idempotency_key
from luyen.rollout.tools.user_code import InvalidArguments, ToolError

__all__ = ["InvalidArguments", "ToolError", "ToolReply", "idempotency_key", "tool", "tool_class"]
