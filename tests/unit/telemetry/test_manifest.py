"""The manifest holds what is needed to repeat a run."""

import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from luyen.telemetry.manifest import collect, git_revision


def test_versions_settings_and_seeds_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MKL_CBWR", "AVX512,STRICT")
    monkeypatch.setenv("MY_SECRET", "hidden")
    facts = collect(
        seeds={"run": 7},
        datasets={"train": "sha256:ab"},
        gpus=("A card",),
        threads={"torch": 2},
        folder=tmp_path,
    ).as_json()
    assert facts["versions"]["python"] == platform.python_version()
    assert facts["versions"]["torch"] == metadata.version("torch")
    assert facts["versions"]["luyen"] == metadata.version("luyen")
    assert facts["settings"]["MKL_CBWR"] == "AVX512,STRICT"
    assert "hidden" not in json.dumps(facts["settings"])
    assert (facts["seeds"], facts["datasets"]) == ({"run": 7}, {"train": "sha256:ab"})
    assert (facts["threads"], facts["hardware"]["gpus"]) == ({"torch": 2}, ["A card"])
    assert facts["hardware"]["cores"] >= 1
    assert facts["revision"] is None
    assert facts["code"].startswith("sha256:")
    assert facts["packages"]["pytest"] == metadata.version("pytest")
    assert not facts["packages"].keys() & facts["versions"].keys()
    assert facts["folder"] == str(tmp_path.resolve())


def test_a_package_that_is_not_installed_has_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("luyen.telemetry.manifest.PACKAGES", ("no-such-package",))
    facts = collect(seeds={}, datasets={}, folder=tmp_path)
    assert facts.versions["no-such-package"] is None


def git(folder: Path, *words: str) -> str:
    name = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(
        ["git", "-C", str(folder), *name, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_revision_says_whether_files_differ_from_it(tmp_path: Path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a.txt").write_text("one")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_revision(tmp_path) == {"commit": commit, "modified": False}
    (tmp_path / "a.txt").write_text("two")
    assert git_revision(tmp_path) == {"commit": commit, "modified": True}


def test_without_git_there_is_no_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_revision(tmp_path) is None


def test_a_repository_that_came_with_a_folder_starts_no_program(tmp_path: Path):
    started = tmp_path / "started"
    place = tmp_path / "theirs"
    place.mkdir()
    git(place, "init", "-q")
    (place / "a.txt").write_text("one")
    git(place, "add", "a.txt")
    git(place, "commit", "-q", "-m", "first")
    program = tmp_path / "program.sh"
    program.write_text(f'#!/bin/sh\necho "$0" >> {started}\ncat\n')
    program.chmod(0o755)
    (place / ".git" / "hooks" / "post-index-change").write_text(program.read_text())
    (place / ".git" / "hooks" / "post-index-change").chmod(0o755)
    git(place, "config", "core.fsmonitor", str(program))
    git(place, "config", "filter.theirs.clean", str(program))
    git(place, "config", "filter.other.process", str(program))
    (place / ".git" / "info" / "attributes").write_text("*.txt filter=theirs\n*.md filter=other\n")
    (place / "a.txt").write_text("two")
    found = git_revision(place)
    assert found is not None
    assert not started.exists()


def test_a_filter_of_the_repository_leaves_open_whether_files_differ(tmp_path: Path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a.txt").write_text("one")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-q", "-m", "first")
    git(tmp_path, "config", "filter.theirs.clean", "cat")
    found = git_revision(tmp_path)
    assert found is not None
    assert found["modified"] is None


def test_where_git_cannot_say_whether_files_differ_nothing_is_said(tmp_path: Path):
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitattributes").write_text("*.txt filter=theirs\n")
    (tmp_path / "a.txt").write_text("one")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "first")
    git(tmp_path, "config", "filter.theirs.required", "true")  # without a program: status fails
    (tmp_path / "a.txt").write_text("two")
    found = git_revision(tmp_path)
    assert found is not None
    assert found["modified"] is None
