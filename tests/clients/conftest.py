"""Other projects' clients against `luyen serve`: `make test-clients` makes their environment."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from luyen.serve.model import open_model
from tests.serving import Running, running

VARIABLE = "LUYEN_CLIENTS_PYTHON"
PYTHON = os.environ.get(VARIABLE, "")
FOLDER = Path(__file__).parent
Run = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs clients that are not installed."""
    mark = pytest.mark.skip(reason=f"{VARIABLE} names no python with clients: make test-clients")
    for item in items:
        if FOLDER in item.path.parents and not PYTHON:
            item.add_marker(mark)


@pytest.fixture(scope="session")
def sums() -> Iterator[Running]:
    """The built-in model that adds, under the name `sums`."""
    model = open_model("builtin://arithmetic", name="sums", overrides=(), is_trusted=False)
    with running(model) as found:
        yield found


@pytest.fixture(scope="session")
def caller() -> Iterator[Running]:
    """The built-in model that calls tools, under the name `caller`."""
    model = open_model("builtin://tools", name="caller", overrides=(), is_trusted=False)
    with running(model) as found:
        yield found


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a program of the clients' environment; what it prints. Nothing of it is fetched."""

    def call(*words: str | Path, **variables: str) -> str:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(tmp_path / "hub"),
            "TOKENIZERS_PARALLELISM": "false",
            "NO_COLOR": "1",
            **variables,
        }
        done = subprocess.run(
            [PYTHON, *map(str, words)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    return call
