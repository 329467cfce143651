"""Every test runs on one core, so that suites can share a machine, and with exact arithmetic."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from luyen.base.process_setup import prepare_process
from tests.forked_python import forked_executable, reserve
from tests.suites import CORE, SUITES, is_chosen, suite_of

# Runs of these tests are signed with a key of their own, not with the user's.
_keys = tempfile.mkdtemp(prefix="luyen-key-")
atexit.register(shutil.rmtree, _keys, ignore_errors=True)
os.environ["LUYEN_KEY_FILE"] = str(Path(_keys) / "key")

# A shell that starts the tests in the background has them, and all they start, ignore Ctrl-C, and
# nohup has them ignore SIGHUP.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Made here and not by a worker of xdist: they share its server.
reserve()

# What is imported while tests are collected stays to the end: there is no garbage to look for.
gc.disable()
prepare_process()
torch.set_num_threads(1)

# How long an example takes says nothing on a machine that others use too.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


def pytest_collection_finish() -> None:
    """From here on garbage is looked for, but not in what was imported, and not all the time."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def pytest_runtest_setup() -> None:
    """Runs of this process draw no curves, which take longer than they do.

    Runs in processes of their own do; `tests/e2e/test_interrupt.py` looks for the pictures.
    """
    session: Any = sys.modules.get("luyen.train.session")
    if session is not None:
        session.plot_curves = lambda *_: []


_TOGETHER = ("ray", "ranks")
"""Suites whose files share what is slow to make: a cluster, and the server that forks ranks."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--suite NAME`: tests of one suite, of the core, or `parts`: all suites but the core."""
    names = [CORE, "parts", *SUITES]
    parser.addoption("--suite", choices=names, help="see tests/suites.py; all tests by default")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of suites that were not chosen are not even imported."""
    if collection_path.suffix != ".py":
        return None
    path = collection_path.relative_to(Path(__file__).parent).as_posix()
    return None if is_chosen(path, config.getoption("suite")) else True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile` keeps the tests of a file together, and here some files with each other."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            suite = suite_of(file.removeprefix("tests/"))
            return suite if suite in _TOGETHER else file

    return Together(config, log)


@pytest.fixture(scope="session")
def cluster_address() -> Iterator[str]:
    """Address of a Ray cluster of four logical cores on this machine, for all tests of a worker.

    Its workers are forked with everything imported. Tests of how a cluster begins and ends have
    clusters of their own.
    """
    Cluster = pytest.importorskip("ray.cluster_utils").Cluster
    head: dict[str, object] = {
        "num_cpus": 4,
        "include_dashboard": False,
        "object_store_memory": 200 << 20,
    }
    head["_system_config"] = {"prestart_worker_first_driver": False}
    with forked_executable():
        cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster.address
    cluster.shutdown()
