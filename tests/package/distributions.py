"""The sdist and the wheel of this tree, built from its tracked and new files only."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from tests.architecture.tree import ROOT

_BUILD = "from setuptools.build_meta import build_{kind}; print(build_{kind}({folder!r}))"


def copy_tree(to: Path) -> Path:
    """A copy of the repository without what git ignores, as a clean clone has it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    return to


def build(kind: str, tree: Path, folder: Path) -> Path:
    """Build `sdist` or `wheel` of a tree into a folder, with the setuptools of this Python."""
    folder.mkdir(parents=True, exist_ok=True)
    code = _BUILD.format(kind=kind, folder=str(folder))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tree, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"the {kind} was not built:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return folder / done.stdout.splitlines()[-1]


def unpack(sdist: Path, to: Path) -> Path:
    """The folder that a source distribution holds."""
    with tarfile.open(sdist) as archive:
        archive.extractall(to, filter="data")
    [folder] = to.iterdir()
    return folder


def names_of(distribution: Path) -> set[str]:
    """Files in a wheel; files in an sdist below its one folder."""
    if distribution.suffix == ".whl":
        with zipfile.ZipFile(distribution) as archive:
            return {name for name in archive.namelist() if not name.endswith("/")}
    with tarfile.open(distribution) as archive:
        files = [member.name for member in archive.getmembers() if member.isfile()]
    return {name.partition("/")[2] for name in files}


def metadata_of(wheel: Path) -> str:
    """The METADATA file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return archive.read(name).decode()
