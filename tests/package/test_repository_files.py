"""Workflow files, Dockerfile, pins and metadata agree with the rest of the repository.

`make lint-files` holds them to the schemas of their formats; here is what no schema knows.
"""

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from typing import Any

import pytest
import yaml

import luyen
from tests.architecture.tree import ROOT
from tests.package.lock import closure, page, pins

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def steps(workflow: Any) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_there_are_three_workflows():
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "docs.yml", "release.yml"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_targets_that_exist_with_few_rights(path: Any):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    wanted = {
        name for s in steps(workflow) for name in re.findall(r"make ([a-z-]+)", s.get("run", ""))
    }
    assert wanted <= TARGETS
    unversioned = [s["uses"] for s in steps(workflow) if "uses" in s and "@" not in s["uses"]]
    assert unversioned == []


def test_every_version_of_python_that_is_named_is_tested():
    matrix = read(".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: 3." in c]
    assert matrix == named
    assert PROJECT["requires-python"] == f">={matrix[0]}"


def test_continuous_integration_runs_what_the_script_runs():
    script = set(re.findall(r"^make ([a-z-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
    run = {s.get("run", "").removeprefix("make ") for s in steps(read(".github/workflows/ci.yml"))}
    assert {"check", "test", "demo", "demo-tools"} <= script <= run


def test_only_the_publishing_job_has_an_identity():
    jobs = read(".github/workflows/release.yml")["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["needs"] == "build"
    assert "permissions" not in jobs["build"]
    assert "password" not in (ROOT / ".github/workflows/release.yml").read_text().replace(
        "no password", ""
    )


def test_the_version_is_the_same_everywhere():
    assert luyen.__version__ == PROJECT["version"]
    assert read("CITATION.cff")["version"] == PROJECT["version"]
    assert read("CITATION.cff")["license"] == PROJECT["license"]


def test_the_lock_file_pins_everything_that_is_needed():
    needed = set(closure("luyen", frozenset({"dev"}))) - {"luyen", "pip"}
    pinned = pins((ROOT / "constraints.txt").read_text())
    assert needed - set(pinned) == set(), "run `make lock`, or add the pins by hand"
    assert all(re.fullmatch(r"[0-9][\w.]*", version) for version in pinned.values()), pinned


def test_a_lock_file_is_read_back():
    made = page({"torch": "2.13.0", "luyen": "0.1.0", "jinja2": "3.1.6"})
    assert pins(made) == {"jinja2": "3.1.6", "torch": "2.13.0"}
    with pytest.raises(ValueError, match=r"torch>=2"):
        pins("torch>=2\n")


def test_tools_have_one_version():
    hooks = {
        repo["repo"].rpartition("/")[2]: repo.get("rev")
        for repo in read(".pre-commit-config.yaml")["repos"]
    }
    pinned = pins((ROOT / "constraints.txt").read_text())
    lint = pins((ROOT / "requirements" / "lint.txt").read_text())
    assert hooks["ruff-pre-commit"] == f"v{pinned['ruff']}"
    assert hooks["check-jsonschema"] == lint["check-jsonschema"]
    assert f"torch=={pinned['torch']}" in DOCKERFILE
    assert f"torch=={pinned['torch']}" in (ROOT / "Makefile").read_text()


def test_the_dockerfile_copies_what_is_there_and_not_ignored():
    lines = re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
    sources = [word for line in lines for word in line.split()[:-1]]
    assert {"src", "pyproject.toml", "constraints.txt"} <= set(sources)
    assert [name for name in sources if not (ROOT / name).exists()] == []
    kept = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    ]
    assert [name for name in sources if not any(fnmatch(name, one) for one in kept)] == []


def test_images_have_a_version_and_a_user_without_rights():
    images = re.findall(r"^FROM (\S+) AS (\w+)", DOCKERFILE, re.MULTILINE)
    stages = [name for _, name in images]
    assert stages[-2:] == ["cpu", "cuda"]
    outside = [image for image, _ in images if image not in stages]
    assert all(re.search(r":\d", image) for image in outside)
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[-2:]:
        assert "USER 1000" in stage
    assert f"python:{PROJECT['requires-python'].removeprefix('>=')}-slim" in DOCKERFILE


def test_a_clean_clone_has_what_the_site_is_built_with():
    """A pattern of .gitignore has hidden the hooks of the site once."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    named = set(re.findall(r"docs/[\w./]+\.py", (ROOT / "mkdocs.yml").read_text()))
    assert len(named) == 2
    assert named <= set(listed)


def test_the_page_about_images_names_their_targets():
    text = (ROOT / "docs" / "docker.md").read_text()
    assert re.findall(r"--target (\w+)", text) == ["cpu", "cuda"]
