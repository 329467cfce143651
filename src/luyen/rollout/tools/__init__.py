"""Tools that a policy may call."""

from luyen.rollout.tools.foreign import InvalidArguments, ToolError
from luyen.rollout.tools.function import tool
from luyen.rollout.tools.ledger import idempotency_key
from luyen.rollout.tools.protocol import ToolReply
from luyen.rollout.tools.stateful import tool_class

__all__ = ["InvalidArguments", "ToolError", "ToolReply", "idempotency_key", "tool", "tool_class"]
