"""Suites of tests: what they name is there, and every file of tests is in exactly one run."""

from tests.architecture.tree import ROOT
from tests.suites import CORE, SUITES, is_chosen, suite_of

TESTS = ROOT / "tests"
FILES = [
    file.relative_to(TESTS).as_posix()
    for file in TESTS.rglob("test_*.py")
    if "node_modules" not in file.parts
]


def test_every_beginning_of_a_suite_meets_a_file() -> None:
    beginnings = [start for starts in SUITES.values() for start in starts]
    assert [start for start in beginnings if not any(f.startswith(start) for f in FILES)] == []


def test_no_file_belongs_to_two_suites() -> None:
    twice = [
        file
        for file in FILES
        if sum(any(file.startswith(start) for start in starts) for starts in SUITES.values()) > 1
    ]
    assert twice == []


def test_the_core_and_the_parts_are_all_files() -> None:
    for file in FILES:
        assert is_chosen(file, None)
        assert is_chosen(file, CORE) != is_chosen(file, "parts")
    assert suite_of("unit/web/test_new.py") == "studio"
    assert suite_of("unit/train/test_new.py") == CORE


def test_continuous_integration_runs_both() -> None:
    for name in (".ci/run", ".github/workflows/ci.yml"):
        text = (ROOT / name).read_text()
        assert "make test\n" in text, name
        assert "make test-parts\n" in text, name
