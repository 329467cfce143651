"""The page of metrics, from the declarations of every module; run as a script, it prints it."""

import sys

from luyen.telemetry.catalog import CATALOG, metrics_page
from tests.architecture.tree import modules


def current_page() -> str:
    """What `docs/metrics.md` should say: importing a module declares the metrics it emits."""
    assert list(modules()), "importing every module fills the catalog"
    return metrics_page(CATALOG.all(prefix="luyen."))


if __name__ == "__main__":
    sys.stdout.write(current_page())
