"""Nothing may be left of a program: no process, no directory."""

import tempfile
from time import monotonic, sleep

import pytest

from tests.unit.sandbox.programs import children


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path, monkeypatch):
    """Every test runs with a temporary directory of its own, which must be empty afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = children()
    yield
    deadline = monotonic() + 5
    while children() - before and monotonic() < deadline:
        sleep(0.01)
    assert children() - before == set()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("luyen-")] == []
