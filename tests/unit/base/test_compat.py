"""The supported range is stated once and matches what pip is told."""

import tomllib
from pathlib import Path

from luyen.base.process_setup import SUPPORTED, version_of

ROOT = Path(__file__).parents[3]


def test_the_range_is_that_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for package, ((major, first), (_, beyond)) in SUPPORTED.items():
        assert f"{package}>={major}.{first},<{major}.{beyond}" in declared


def test_versions_are_read_without_importing() -> None:
    assert version_of("torch") is not None
    assert version_of("no-such-package-here") is None
