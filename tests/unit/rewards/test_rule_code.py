"""Which files stand for the code of a rule."""

import sys
from pathlib import Path

import pytest

import luyen
from luyen.rewards.cache import code_of
from luyen.rewards.rules.length import overlong
from luyen.rewards.user_functions import load_module

FILES = {
    "own.py": "import json, near\nfrom pack import inner\ndef mine():\n    import later\n",
    "near.py": "import os\n",
    "later.py": "BAR = 1\n",
    "pack/__init__.py": "",
    "pack/inner.py": "from . import deep\n",
    "pack/deep.py": "import near\n",
}


def code(folder: Path) -> list[str]:
    found = code_of(load_module(str(folder / "own.py"), field="trainer.plugins").mine)
    assert found is not None
    return found


@pytest.mark.parametrize("changed", FILES)
def test_every_file_that_a_rule_imports_is_its_code(tmp_path: Path, monkeypatch, changed: str):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "pack").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    before = code(tmp_path)
    (tmp_path / "unrelated.py").write_text("# other\n")
    assert code(tmp_path) == before
    (tmp_path / changed).write_text(f"{FILES[changed]}# other\n")
    assert code(tmp_path) != before
    for module in ("near", "later", "pack", "pack.inner", "pack.deep"):
        sys.modules.pop(module, None)


def test_our_own_rules_are_our_version_and_our_rewards():
    found = code_of(overlong)
    assert found is not None
    assert found[0] == luyen.__version__
    assert len(found) == 2
