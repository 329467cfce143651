"""The manifest of a run: everything needed to reproduce it, collected without importing torch."""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, final

from luyen.base.process_setup import installed_version
from luyen.base.secrets import is_secret_name, masked_tree, masked_words
from luyen.base.system import memory_bytes
from luyen.telemetry.fingerprints import source_fingerprint

PACKAGES = ("luyen", "torch", "transformers", "numpy", "safetensors", "pyarrow", "peft", "ray")
"""Packages whose version can change a number or a file."""
SETTINGS = ("MKL_", "OMP_", "KMP_", "CUBLAS_", "CUDA_", "NVIDIA_TF32", "TORCH_", "PYTORCH_")
"""Beginnings of the environment variables that can change a number."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Software, hardware and inputs of a run.

    Example:
        >>> facts = collect(seeds={"run": 0}, datasets={"train": "sha256:ab"})
        >>> facts.seeds, "torch" in facts.versions
        ({'run': 0}, True)
    """

    versions: dict[str, str | None]
    """Python and the packages that matter; None for one that is not installed."""
    packages: dict[str, str]
    """Every other installed package of which something was imported when the run began."""
    code: str
    """Hash over the source files of Luyen, committed or not, at the first run of the process."""
    hardware: dict[str, Any]
    """System, processor, cores, memory, and the GPUs that the caller names."""
    settings: dict[str, str]
    """Environment variables that can change a number."""
    threads: dict[str, int | None]
    """Threads that libraries may use, as the caller gives them."""
    seeds: dict[str, int]
    """Seeds by purpose."""
    datasets: dict[str, str]
    """Fingerprint of each dataset."""
    files: dict[str, dict[str, str]]
    """Path and fingerprint of files named by keys: code, tool lists, weights, tokenizers."""
    revision: dict[str, Any] | None
    """Git revision of the folder the run was started in; None outside a repository."""
    command: list[str]
    """The command line, with secrets masked."""
    folder: str
    """The working directory, which relative paths refer to."""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def collect(
    *,
    seeds: Mapping[str, int],
    datasets: Mapping[str, str],
    gpus: Sequence[str] = (),
    threads: Mapping[str, int | None] | None = None,
    files: Mapping[str, Mapping[str, str]] | None = None,
    folder: Path | None = None,
) -> Manifest:
    """The manifest of this process; the caller passes what only torch knows (GPUs, threads)."""
    place = folder or Path.cwd()
    return Manifest(
        versions=versions(),
        packages=imported_packages(),
        code=_code(),
        hardware=_hardware() | {"gpus": list(gpus)},
        settings=settings_of(os.environ),
        threads=dict(threads or {}),
        seeds=dict(seeds),
        datasets=dict(datasets),
        files=masked_tree({name: dict(facts) for name, facts in (files or {}).items()}),
        revision=git_revision(place),
        command=masked_words(sys.argv),
        folder=str(place.resolve()),
    )


@cache
def _code() -> str:
    """Fingerprint of Luyen's own source files, as they were when this process first asked."""
    return source_fingerprint(Path(str(resources.files("luyen"))))


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter; None for one that is not installed."""
    return {"python": platform.python_version()} | {p: installed_version(p) for p in PACKAGES}


def imported_packages() -> dict[str, str]:
    """Versions of the installed packages that are imported, except those in `PACKAGES`."""
    loaded = {name.partition(".")[0].lower() for name in sys.modules}
    listed = installed_packages()
    return {
        name: version
        for name, (version, modules) in sorted(listed.items())
        if name not in PACKAGES and modules & loaded
    }


def installed_packages() -> dict[str, tuple[str, set[str]]]:
    """Package -> version and top-level modules, from the names of the `.dist-info` folders.

    Reading the metadata of every package would take a tenth of a second.
    """
    found: dict[str, tuple[str, set[str]]] = {}
    for place in filter(None, sys.path):
        for folder in sorted(Path(place).glob("*.dist-info")):
            name, _, version = folder.name.removesuffix(".dist-info").partition("-")
            listing = folder / "top_level.txt"
            tops = listing.read_text().split() if listing.is_file() else []
            modules = {top.lower() for top in tops} or {name.lower()}
            found.setdefault(name.lower().replace("_", "-"), (version, modules))
    return found


def _hardware() -> dict[str, Any]:
    memory = memory_bytes()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processor": _processor(Path("/proc/cpuinfo")),
        "cores": os.cpu_count(),
        "memory_bytes": memory,
    }


def _processor(listing: Path) -> str:
    """The processor's name: its kernels, and so the last bits of a sum, depend on it."""
    if listing.is_file():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def settings_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that can change a number, without secrets."""
    names = [name for name in sorted(environment) if name.startswith(SETTINGS)]
    found = {name: environment[name] for name in names if not is_secret_name(name)}
    return masked_tree(found)


_NO_PROGRAMS = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "status.submoduleSummary=false")
_NO_FETCHES = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0"}
_FILTERS = r"^filter\..*\.(clean|process)$"


def git_revision(folder: Path) -> dict[str, Any] | None:
    """Commit and whether files differ from it; None outside a repository or without git.

    A repository may have come with a folder of another user, so that no program that it names is
    started: whether files differ stays None where it has filters, without which git cannot say.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    if _has_filters(folder):
        return {"commit": commit, "modified": None}
    words = ("status", "--porcelain", "-uno", "--ignore-submodules=dirty")
    listed = _git(folder, *words)
    return {"commit": commit, "modified": None if listed is None else bool(listed)}


def _has_filters(folder: Path) -> bool:
    """Whether the repository itself, not its user, names programs that files go through."""
    # Without a match git exits with 1, as it does where it cannot tell the scope; the second
    # question tells the two apart.
    listed = _git(folder, "config", "--show-scope", "--name-only", "--get-regexp", _FILTERS)
    if listed is None:
        return _git(folder, "config", "--show-scope", "--list", "--name-only") is None
    return any(line.split()[0] in ("local", "worktree") for line in listed.splitlines())


def _git(folder: Path, *words: str) -> str | None:
    settings = [word for setting in _NO_PROGRAMS for word in ("-c", setting)]
    try:
        done = subprocess.run(
            ["git", *settings, "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
            env={**os.environ, **_NO_FETCHES},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
