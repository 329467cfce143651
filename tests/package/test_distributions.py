"""What the wheel and the sdist hold, and what the wheel says of itself."""

import tomllib
from email.parser import HeaderParser
from pathlib import Path

import pytest

from tests.architecture.tree import PACKAGE, ROOT
from tests.package.distributions import build, copy_tree, metadata_of, names_of, unpack

MOST_BYTES = 8_000_000


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = copy_tree(tmp_path_factory.mktemp("tree"))
    return build("sdist", tree, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as `python -m build` does."""
    tree = unpack(sdist, tmp_path_factory.mktemp("unpacked"))
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


def package_files() -> set[str]:
    found = (path for path in (ROOT / PACKAGE).rglob("*") if path.is_file())
    return {
        path.relative_to(ROOT / "src").as_posix()
        for path in found
        if "__pycache__" not in path.parts
    }


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path):
    held = {name for name in names_of(wheel) if ".dist-info/" not in name}
    assert held == package_files()
    assert {"luyen/py.typed", "luyen/builtin/quickstart.yaml"} <= held
    about = {Path(name).name for name in names_of(wheel) if ".dist-info/" in name}
    assert "LICENSE" in about


def test_the_sdist_holds_pages_and_recipes_but_no_tests(sdist: Path):
    held = names_of(sdist)
    assert {f"src/{name}" for name in package_files()} <= held
    assert {"README.md", "README.vi.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= held
    assert {"docs/own_task.md", "recipes/quickstart.yaml"} <= held
    tops = {name.partition("/")[0] for name in held}
    assert tops & {"tests", "benchmarks", "typings", "shared", "runs", ".ci", ".github"} == set()


def test_both_are_small(wheel: Path, sdist: Path):
    assert 1_000_000 < wheel.stat().st_size < MOST_BYTES
    assert 1_000_000 < sdist.stat().st_size < MOST_BYTES


def test_the_metadata_names_licence_versions_and_extras(wheel: Path):
    told = HeaderParser().parsestr(metadata_of(wheel))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (told["Name"], told["Version"]) == ("luyen", project["version"])
    assert told["License-Expression"] == "Apache-2.0"
    assert told["License-File"] == "LICENSE"
    assert told["Requires-Python"] == ">=3.11"
    assert set(told.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    classifiers = told.get_all("Classifier")
    assert "Typing :: Typed" in classifiers
    # PEP 639: the expression takes the place of classifiers.
    assert [name for name in classifiers if name.startswith("License")] == []
    assert "Programming Language :: Python :: 3.14" in classifiers
    assert told.get_content_type() == "text/plain"
    assert told["Description-Content-Type"] == "text/markdown"
