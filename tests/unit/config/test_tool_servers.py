"""Servers of a tool file that no process can start, or no request can reach, are refused."""

from pathlib import Path
from typing import Any

import pytest

from luyen.config.tool_file import server_faults


@pytest.mark.parametrize(
    "server",
    [
        {"url": "file:///etc/passwd"},
        {"url": "ftp://127.0.0.1/"},
        {"url": "http://[::1"},
        {"url": "http://127.0.0.1:99999/"},
        {"url": "http:///path"},
        {"command": "a\0b"},
        {"command": ["true", "a\0b"]},
        {"command": "true", "env": {"A=B": "x"}},
        {"command": "true", "env": {"A": "x\0"}},
        {"command": "true", "env": {"": "x"}},
    ],
)
def test_a_server_that_cannot_be_reached_is_refused(tmp_path: Path, server: dict[str, Any]):
    [(key, *_)] = server_faults(server, tmp_path)
    assert key in (".mcp.url", ".mcp.command", ".mcp.env")


@pytest.mark.parametrize(
    "server",
    [
        {"url": "http://127.0.0.1:8000/mcp", "headers": {"x": "y"}},
        {"url": "${oc.env:SERVER}"},
        {"command": ["python", "server.py"], "env": {"SIZE": 5}},
    ],
)
def test_a_server_that_can_be_reached_is_taken(tmp_path: Path, server: dict[str, Any]):
    assert not [*server_faults(server, tmp_path)]
