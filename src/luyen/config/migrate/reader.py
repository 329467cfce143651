"""Reads a file or a command of another tool: whose it is, and its keys with their values."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.input_files import is_directory, is_file
from luyen.config.check import is_installed
from luyen.config.loader.yaml_tree import read_tree
from luyen.config.migrate import axolotl, llama_factory, trl, verl
from luyen.config.migrate.common import file_text, file_values, placing
from luyen.config.migrate.python_values import parsed
from luyen.config.migrate.report import SourceConfig
from luyen.config.migrate.shell import is_script, training_commands


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRequest:
    """What to migrate, and for where.

    Example:
        >>> MigrationRequest(text="python -m verl.trainer.main_ppo trainer.nnodes=2").devices
        1
    """

    text: str
    """Path of a file, or a command."""
    output: Path | None = None
    """File that will hold the result: relative paths in it start from its folder."""
    devices: int = 1
    """Devices that it ran on, for tools whose sizes are for one device."""
    installed: Callable[[str], bool] = is_installed
    """Whether a Python package is installed."""


def read_source(request: MigrationRequest) -> SourceConfig:
    """The keys of what is to be migrated; a UserError for what is of no tool."""
    text = request.text.strip()
    if is_directory(text):
        raise UserError("source", text, "it is a folder", "give the file that starts training")
    if is_file(text):
        return _read_file(Path(text).expanduser(), request)
    if "=" not in text and " " not in text:
        raise UserError("source", text, "no such file", "give a file, or a command in quotes")
    source = _source("the command", Path.cwd(), request)
    return _read_last(text, source)


def _source(where: str, folder: Path, request: MigrationRequest) -> SourceConfig:
    # Paths of all four tools start from the folder that they are started in.
    here = Path.cwd()
    output = here if request.output is None else request.output.absolute().parent
    return SourceConfig(
        tool="",
        where=where,
        method="",
        values={},
        devices=request.devices,
        installed=request.installed,
        place=placing(here, output),
        folder=str(folder if folder != here else here),
    )


def _read_file(path: Path, request: MigrationRequest) -> SourceConfig:
    text = file_text(path)
    source = _source(path.name, path.absolute().parent, request)
    if path.suffix == ".py":
        try:
            return trl.read_python(parsed(text, str(path)), source, str(path))
        except RecursionError as error:
            why, fix = "its expressions are nested too deeply", "write the values as literals"
            raise UserError("source", str(path), why, fix) from error
    if path.suffix in (".yaml", ".yml", ".json"):
        return _read_values(file_values(path), source, hint=f"{path.parent.name} {path.stem}")
    return _read_last(text, source)


def _read_last(text: str, source: SourceConfig) -> SourceConfig:
    """The last training command of a script; where there are several, `where` says so."""
    found = training_commands(text)
    if len(found) > 1:
        source = replace(source, where=f"{source.where}, the last of {len(found)} commands")
    return _read_command(found[-1], source)


def _read_values(values: Mapping[str, Any], source: SourceConfig, *, hint: str) -> SourceConfig:
    """A YAML file: its keys say whose it is."""
    if axolotl.is_axolotl(values):
        return axolotl.read_yaml(values, source)
    if llama_factory.is_llama_factory(values):
        return llama_factory.read_yaml(values, source)
    if verl.is_verl(values):
        return verl.read_yaml(values, source)
    if trl.is_trl(values):
        return trl.read_yaml(values, source, hint)
    why = "its keys are those of neither verl, TRL, LLaMA-Factory nor Axolotl"
    raise UserError("source", source.where, why, "give the file that a run is started with")


def _read_command(words: Sequence[str], source: SourceConfig) -> SourceConfig:
    """A command: of verl with its overrides, or of another tool with its file and options."""
    text = " ".join(words)
    is_other = re.search(r"\b(llamafactory-cli|axolotl|trl)\b", text) is not None
    if not is_other and not is_script(list(words)):
        return verl.read_words(words, source)
    options = trl.read_options(words)
    config = options.pop("config", None)
    files = [word for word in words if word.endswith((".yaml", ".yml")) and is_file(word)]
    named = str(config) if config is not None else next(iter(files), None)
    values: dict[str, Any] = {}
    if named is not None:
        values = file_values(Path(named).expanduser())
    for word in words[_first(words) :]:
        key, equals, raw = word.partition("=")
        if equals and re.fullmatch(r"\w+", key):
            values[key] = read_tree(f"value: {raw}", "command").values.get("value", raw)
    return _read_values({**values, **options}, source, hint=text)


def _first(words: Sequence[str]) -> int:
    """Where a command begins: variables of its environment stand before it."""
    is_variable = [re.match(r"[A-Za-z_]\w*=", word) is not None for word in words]
    return is_variable.index(False) if False in is_variable else len(words)
