"""Processor time by file of tests, most first: `pytest -p tests.processor_time`, with `-n` too.

Counted are the process of a test and the children that it waited for. What a test finds made (a
trained model, a cluster) counts for the test that made it. Forks of `tests/forked_python.py` are
children of its server, and are not counted.
"""

import os
from collections import Counter
from typing import Any

import pytest

_SPENT = "processor seconds"
_BEGAN = pytest.StashKey[float]()
_FILES = Counter[str]()
_MOST = 60


def _used() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before anything is made for the test."""
    item.stash[_BEGAN] = _used()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """The report of the last phase says what all phases took."""
    report = yield
    if call.when == "teardown":
        report.user_properties.append((_SPENT, _used() - item.stash[_BEGAN]))
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Imports and collection: of this process, or of a worker of xdist."""
    worker: Any = session.config
    if hasattr(worker, "workeroutput"):
        worker.workeroutput[_SPENT] = _used()
    else:
        _FILES["(imports and collection)"] += _used()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of xdist has ended."""
    _FILES["(imports and collection)"] += node.workeroutput.get(_SPENT, 0.0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Here, or in the process that hears of all workers."""
    seconds = dict(report.user_properties).get(_SPENT)
    if isinstance(seconds, float):
        _FILES[report.nodeid.partition("::")[0]] += seconds


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table."""
    terminalreporter.write_line(f"{sum(_FILES.values()):8.1f} s of the processor in all")
    for file, seconds in _FILES.most_common(_MOST):
        terminalreporter.write_line(f"{seconds:8.1f} {file}")
