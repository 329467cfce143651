"""What several tests of rollouts use."""

from collections.abc import Callable
from pathlib import Path

import pytest

from luyen.telemetry.journal import WorkJournal


@pytest.fixture
def taken_up(tmp_path: Path) -> Callable[[], WorkJournal]:
    """The journal as each new process finds it."""

    def journal() -> WorkJournal:
        found = WorkJournal(tmp_path, run_id="r")
        found.begin(0, kind="work", basis=["b"])
        return found

    return journal
