"""Whom the guard remembers: also those whose mark can no longer be seen."""

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager

from luyen.runtime.ray.reaper import MARK, ProcessInfo, carries, family

CHILD = "import time; print('up', flush=True); time.sleep(60)"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", {CHILD!r}], env={{}}, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


@contextmanager
def a_cluster(mark: str) -> Generator[tuple[subprocess.Popen[str], int]]:
    """A process that carries the mark, and a child of it that does not."""
    words = [sys.executable, "-S", "-c", PARENT]
    env = {**os.environ, MARK: mark}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            yield parent, child
        finally:
            parent.kill()
            os.kill(child, 9)


def test_a_child_without_the_mark_is_remembered_when_its_parent_has_died():
    with a_cluster("one") as (parent, child):
        assert not carries(child, "one")
        known = family(set(), "one")
        assert {one.pid for one in known} == {parent.pid, child}
        parent.kill()
        parent.wait()
        assert {one.pid for one in family(known, "one")} == {child}
        assert family(set(), "one") == set()


def test_a_number_that_was_given_again_is_nobody_we_know():
    with a_cluster("two") as (parent, child):
        earlier = {ProcessInfo(os.getppid(), 0)}
        assert {one.pid for one in family(earlier, "two")} == {parent.pid, child}
