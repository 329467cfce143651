"""A real MCP server: `python mcp_server.py stdio`, or `python mcp_server.py http PORT`."""

import os
import sys

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("numbers")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Report an error."""
    raise ValueError("not today")


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def key(context: Context) -> str:
    """The idempotency key of the call."""
    meta = context.request_context.meta or {}
    return str(dict(meta).get("luyen/idempotency-key"))


@server.tool()
def pid() -> int:
    """Id of the server's process."""
    return os.getpid()


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", port=int(sys.argv[2]))
