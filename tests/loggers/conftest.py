"""Real loggers: `make test-loggers` makes their environment, and runs these tests in it."""

from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGES = ("wandb", "mlflow", "trackio", "tensorboard", "sqlalchemy", "pandas")
MISSING = [name for name in PACKAGES if find_spec(name) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs packages that are not installed."""
    mark = pytest.mark.skip(reason=f"{', '.join(MISSING)} not installed: make test-loggers")
    for item in items:
        if Path(__file__).parent in item.path.parents and MISSING:
            item.add_marker(mark)
