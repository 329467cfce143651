"""Public configurations of four tools as tables of keys and values, and files made of them.

Templates and prompts are shortened, and some keys without a value are left out.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "data" / "migrate"
TOOLS = ("verl", "trl", "llama_factory", "axolotl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration that is public."""

    tool: str
    source: str
    facts: dict[str, Any]

    def write(self, folder: Path) -> str:
        """The configuration as the tool reads it: the path of a file."""
        for name, values in self.facts.get("files", {}).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
        if "overrides" in self.facts:
            return _script(self.facts, folder)
        if "calls" in self.facts:
            return _python(self.facts, folder)
        name = f"{self.facts.get('name', 'config')}.yaml"
        (folder / name).write_text(yaml.safe_dump(self.facts["values"], sort_keys=False))
        return str(folder / name)


def _script(facts: dict[str, Any], folder: Path) -> str:
    lines = ["set -x", *facts.get("variables", [])]
    words = [f"    {word} \\" for word in facts["overrides"]]
    lines += [f"{facts['command']} \\", *words, "    $@"]
    (folder / "run.sh").write_text("\n".join(lines) + "\n")
    return str(folder / "run.sh")


def _python(facts: dict[str, Any], folder: Path) -> str:
    lines = ["import torch", "from trl import *", "", *facts.get("assigned", [])]
    for name, words in facts["calls"].items():
        target, _, function = name.rpartition(" = ")
        head = f"{target} = {function}(" if target else f"{function}("
        lines += [head, *(f"    {word}," for word in words), ")"]
    (folder / "train.py").write_text("\n".join(lines) + "\n")
    return str(folder / "train.py")


def cases(tool: str, *, held_out: bool = False) -> list[Case]:
    """The cases of a tool; those held out were not looked at before they were run."""
    name = f"{tool}_held_out" if held_out else tool
    path = FOLDER / f"{name}.yaml"
    listed = yaml.safe_load(path.read_text()) if path.exists() else []
    return [Case(tool=tool, source=one["source"], facts=one) for one in listed]
