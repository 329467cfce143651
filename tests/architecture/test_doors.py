"""Each outside library has one door: ruff refuses it everywhere else, however it is imported."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT, sources

RUFF = [str(Path(sys.executable).parent / "ruff"), "check", "--no-cache", "--select", "TID251"]
BANNED = sorted(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"][
        "flake8-tidy-imports"
    ]["banned-api"]
)
FORMS = {
    "at the top": "import {0}",
    "by name": "from {0} import anything",
    "inside a function": "def f():\n    import {0}\n    return {0}",
    "inside a method": "class C:\n    def f(self):\n        from {0} import anything",
    "for the type checker": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {0}",
}


def said_of(code: str, path: str) -> str:
    """What ruff says of the code, were it at `path`."""
    command = [*RUFF, "--output-format", "concise", "--stdin-filename", path, "-"]
    done = subprocess.run(
        command, cwd=ROOT, input=code, capture_output=True, text=True, check=False
    )
    return done.stdout


def violations(code: str, path: str = "src/luyen/train/planted.py") -> int:
    """How many doors are broken in the code."""
    return said_of(code, path).count("TID251")


def test_every_library_with_a_door_is_banned():
    doors = [
        "bitsandbytes",
        "fastapi",
        "llguidance",
        "mcp",
        "megatron",
        "mlflow",
        "prometheus_client",
        "ray",
        "sglang",
        "starlette",
        "torch.distributed",
        "trackio",
        "transformers",
        "triton",
        "uvicorn",
        "verifiers",
        "vllm",
        "wandb",
    ]
    assert doors == BANNED


@pytest.mark.parametrize("form", FORMS)
def test_a_library_outside_its_door_is_refused(form: str):
    code = "\n".join(FORMS[form].format(name) for name in BANNED)
    said = said_of(code, "src/luyen/train/planted.py")
    assert sorted(set(re.findall(r"TID251 `([\w.]+)` is banned", said))) == BANNED, said


def test_collectives_are_refused_through_torch_itself():
    assert violations("import torch\ntorch.distributed.all_reduce(1)") == 1
    assert violations("from torch import distributed") == 1
    assert violations("import torch as t\nt.distributed.barrier()") == 1
    assert violations("import torch\ntorch.ones(1)") == 0


IMPORTED_BY_TEXT = re.compile(r"import_module\(\s*['\"](" + "|".join(map(re.escape, BANNED)) + ")")
LIFTED = re.compile(r"noqa:[^#\n]*TID251")


def smuggled(text: str) -> list[str]:
    """Ways around the ban: an import by text, or a comment that lifts it."""
    return [m.group() for pattern in (IMPORTED_BY_TEXT, LIFTED) for m in pattern.finditer(text)]


def test_nothing_goes_around_a_door():
    assert [path for path, text in sources() if smuggled(text)] == []
    assert smuggled('importlib.import_module("ray.util")')
    assert smuggled("import ray  # noqa: F401, TID251")
    assert not smuggled('importlib.import_module("luyen.base")')
