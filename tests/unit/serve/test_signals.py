"""A server ends upon a signal, whenever it comes."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, time
from fastapi import FastAPI
from luyen.serve.server import Access, open_socket, serve

number = getattr(signal, sys.argv[1])
opened = open_socket(Access(host="127.0.0.1", port=0))
code = serve(FastAPI(), opened, drain_s=1, ready=lambda: os.kill(os.getpid(), number))
print("ended with", code)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 0), ("SIGINT", 130)])
def test_a_signal_before_the_server_listens_to_signals_ends_it(name: str, code: int):
    command = [sys.executable, "-c", PROGRAM, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (f"ended with {code}\n", 0), done.stderr
