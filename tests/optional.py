"""Tests of an optional package are skipped, with the reason, where it is not installed."""

from importlib.util import find_spec

import pytest


def needs(package: str) -> pytest.MarkDecorator:
    """A mark for tests that call a package which need not be there."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")
