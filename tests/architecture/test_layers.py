"""Layers and doors are contracts: they hold here, and each of them bites when it is broken."""

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.tree import PACKAGE, ROOT

LINT = [str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache"]
TORCH_FREE = ("base", "telemetry", "config")


def lint(folder: Path) -> tuple[bool, str]:
    """Whether the contracts hold for the package in `folder`, and what the linter said."""
    config = ["--config", str(folder / ".importlinter")]
    done = subprocess.run(LINT + config, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(
        ROOT / PACKAGE, tmp_path / "luyen", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / ".importlinter", tmp_path)
    return tmp_path


def plant(folder: Path, file: str, text: str) -> None:
    """Add a module to the copy, and the packages it needs."""
    path = folder / "luyen" / file
    for parent in reversed(path.relative_to(folder).parents[:-1]):
        (folder / parent).mkdir(exist_ok=True)
        (folder / parent / "__init__.py").touch()
    path.write_text(text)


def test_the_contracts_hold(copy: Path):
    kept, said = lint(copy)
    assert kept, said
    assert "4 kept, 0 broken" in said


BREACHES = {
    "base/planted.py": ("import luyen.config", "lower layers only"),
    "base/inside.py": ("def f():\n    import luyen.config", "lower layers only"),
    "rollout/planted.py": ("import luyen.engine.planted", "lower layers only"),
    "config/planted.py": ("import torch", "nothing loads torch"),
    "base/later.py": ("def f():\n    import transformers", "nothing loads torch"),
    "algorithms/planted.py": ("import wandb", "The mathematics knows"),
    "algorithms/inside.py": ("def f():\n    import ray", "The mathematics knows"),
}
"""File -> what it says, and the contract that this breaks."""


def test_every_broken_contract_is_named_with_the_module_that_breaks_it(copy: Path):
    plant(copy, "engine/planted.py", "")
    for file, (text, _) in BREACHES.items():
        plant(copy, file, text)
    plant(copy, "base/one.py", "import luyen.base.two")
    plant(copy, "base/two.py", "import luyen.base.one")
    kept, said = lint(copy)
    assert not kept
    assert "No cycles between the modules of a package BROKEN" in said
    assert "No cycles are allowed in luyen.base." in said
    details = said[said.index("Broken contracts") :]
    for file, (text, contract) in BREACHES.items():
        assert any(contract in line and "BROKEN" in line for line in said.splitlines()), said
        section = details[details.index(contract) :]
        module = f"luyen.{file.removesuffix('.py').replace('/', '.')}"
        assert f"{module} -> {text.split()[-1]} (l." in section, said


def test_a_package_that_is_no_layer_is_named(copy: Path):
    plant(copy, "shapes/planted.py", "")
    kept, said = lint(copy)
    assert not kept
    assert any("lower layers only" in line and "BROKEN" in line for line in said.splitlines()), said


def unguarded(contracts: str, packages: list[str]) -> list[str]:
    """Packages that must be free of torch and exist, but that the contract does not name."""
    parser = configparser.ConfigParser()
    parser.read_string(contracts)
    named = parser["importlinter:contract:torchfree"]["source_modules"].split()
    return [p for p in TORCH_FREE if p in packages and f"luyen.{p}" not in named]


def test_every_package_from_config_down_is_guarded_against_torch():
    contracts = (ROOT / ".importlinter").read_text()
    packages = [path.name for path in (ROOT / PACKAGE).iterdir() if path.is_dir()]
    assert unguarded(contracts, packages) == []
    assert unguarded(contracts.replace("luyen.config\n", ""), ["base", "config"]) == ["config"]


def loaded(*names: str, first: Path = ROOT) -> set[str]:
    """Which heavy libraries a fresh interpreter holds after importing the named modules."""
    heavy = "{'torch', 'transformers', 'ray', 'vllm', 'sglang'}"
    code = (
        f"import sys; sys.path.insert(0, {str(first)!r}); import {', '.join(names)}; "
        f"print(*({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_everything_from_config_down_and_the_commands_loads_no_torch(tmp_path: Path):
    light = [
        path.relative_to(ROOT / "src").with_suffix("").as_posix().replace("/", ".")
        for package in (*TORCH_FREE, "cli")
        for path in sorted((ROOT / PACKAGE / package).rglob("*.py"))
        if path.name != "__init__.py"
    ]
    assert "luyen.base.registry" in light
    assert loaded(*light) == set()
    (tmp_path / "torch.py").touch()
    (tmp_path / "planted.py").write_text("import torch")
    assert loaded("planted", first=tmp_path) == {"torch"}
