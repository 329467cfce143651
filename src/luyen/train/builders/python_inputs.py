"""Python objects in the place of files: rewards, tools, rows and a model that were given as such.

A configuration is data, and a run directory is whole. So every object becomes a file in the run's
`inputs` folder, named by its content, and the configuration names that file: `check`, signature,
fingerprints and resuming work as for files of the user's own.
"""

import hashlib
import inspect
import json
import re
import shutil
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast, final

from luyen.base.errors import UserError
from luyen.base.files import temporary_path, writing
from luyen.base.rundir import RunDirectory
from luyen.config.python_objects import write_objects
from luyen.data.python_rows import are_addresses, is_dataset_dict, splits, write_rows
from luyen.telemetry.callbacks import Callback, demand_callbacks
from luyen.telemetry.early_stopping import EarlyStopping

_TURNS = "actor_rollout_ref.rollout.multi_turn"
_REWARD = "reward.custom_reward_function"
_REWARD_FIX = "give a function, a list of functions, or pairs (function, weight)"
_SUM = "weighted_sum"
"""The function that adds up the scores of several rewards."""
_OF_THE_SUM = frozenset({"score", "completions", "extra_info", "columns", "_combined", _SUM})
"""Names that the sum itself has, in what it returns and in its file."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PythonObjects:
    """What a call of `train` or `check` was given besides configuration.

    Example:
        >>> PythonObjects(model="Qwen/Qwen3-0.6B").is_empty, PythonObjects().is_empty
        (False, True)
    """

    reward: Any = None
    """A function, or a list of functions, names of rules and pairs of those with a weight."""
    data: Any = None
    """Training rows, or names of files."""
    val_data: Any = None
    """Validation rows, or names of files."""
    model: Any = None
    """A path, a name on the hub, or a loaded transformers model."""
    tokenizer: Any = None
    """A path, a name on the hub, or a loaded tokenizer."""
    tools: Any = None
    """Functions and tools of `luyen.tool` and `luyen.tool_class`."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was given."""
        given = (self.reward, self.data, self.val_data, self.model, self.tokenizer, self.tools)
        return all(one is None for one in given)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write what is no name of a file into a folder; the keys that name all of it."""
        keys: dict[str, Any] = {}
        if self.reward is not None:
            keys |= _reward_keys(self.reward, folder)
        keys |= _row_keys(self.data, self.val_data, folder)
        keys |= _model_keys(self.model, self.tokenizer, folder)
        if self.tools is not None:
            keys |= _tool_keys(self.tools, folder)
        return keys


@contextmanager
def kept_if_named(run: Path) -> Iterator[Path]:
    """The folder of a run's inputs; what is written inside and no run names is removed after.

    A run that was refused leaves nothing behind, neither in a new folder nor in that of another
    run.
    """
    folder = RunDirectory(run).inputs
    before = {*folder.iterdir()} if folder.is_dir() else set[Path]()
    try:
        yield folder
    finally:
        directory = RunDirectory(run)
        named = directory.config.read_text() if directory.exists else ""
        for path in {*folder.iterdir()} - before if folder.is_dir() else ():
            if path.name not in named:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for empty in (folder, run):
            if empty.is_dir() and not any(empty.iterdir()):
                empty.rmdir()


# Rewards.


def _reward_keys(reward: Any, folder: Path) -> dict[str, Any]:
    listed: list[Any] = list(reward) if isinstance(reward, list | tuple) else [reward]
    pairs = [_weighted(one) for one in listed]
    if not pairs:
        raise UserError("reward", "[]", "it has no function", _REWARD_FIX)
    if all(isinstance(one, str) for one, _ in pairs):
        parts = {one: {"rule": one, "weight": weight} for one, weight in pairs}
        return {f"reward.components.{one}": value for one, value in parts.items()}
    for one, _ in pairs:
        if not callable(one):
            why = "it is no function, and rules by name do not mix with functions"
            raise UserError("reward", repr(one)[:80], why, _REWARD_FIX)
    is_sum = len(pairs) > 1 or pairs[0][1] != 1.0
    named = _by_name([one for one, _ in pairs], taken=_OF_THE_SUM if is_sum else frozenset())
    path, name = _reward_file(named, [weight for _, weight in pairs], folder)
    return {f"{_REWARD}.path": str(path), f"{_REWARD}.name": name}


def _weighted(one: Any) -> tuple[Any, float]:
    if not isinstance(one, tuple):
        return one, 1.0
    pair = cast(tuple[Any, ...], one)
    is_weight = len(pair) == 2 and isinstance(pair[1], int | float)
    if not is_weight or isinstance(pair[1], bool):
        raise UserError("reward", repr(pair)[:80], "it is no pair (function, weight)", _REWARD_FIX)
    return pair[0], float(pair[1])


def _reward_file(
    named: Mapping[str, Callable[..., Any]], weights: Sequence[float], folder: Path
) -> tuple[Path, str]:
    """The file of the functions, and the name of the one in it that is called."""
    from luyen.rewards.calls import function_of
    from luyen.rewards.combined import combined

    function_of.cache_clear()  # a file of the same content stands for the newest objects
    if len(named) == 1 and list(weights) == [1.0]:
        [name] = named
        return write_objects(folder, "reward", named, live=named).path, name
    listed = [(name, one, w) for (name, one), w in zip(named.items(), weights, strict=True)]

    def weighted_sum(
        completions: list[str], extra_info: list[Any], **columns: Any
    ) -> list[dict[str, float]]:
        return combined(listed, {**columns, "completions": completions, "extra_info": extra_info})

    weighted_sum.__module__ = "luyen_inputs"  # it calls code of the user, and is treated as such
    words = ", ".join(f"({n!r}, {n}, {w!r})" for n, _, w in listed)
    end = (
        "\n\nfrom luyen.rewards.combined import combined as _combined\n\n\n"
        f"def {_SUM}(completions, extra_info, **columns):\n"
        "    given = {**columns, 'completions': completions, 'extra_info': extra_info}\n"
        f"    return _combined([{words}], given)\n"
    )
    file = write_objects(folder, "reward", named, end=end, live={**named, _SUM: weighted_sum})
    return file.path, _SUM


def _by_name(
    functions: Sequence[Callable[..., Any]], *, taken: Container[str]
) -> dict[str, Callable[..., Any]]:
    """Functions by names that Python and metrics can take.

    A second one of a name gets a number, and so does one whose name is `taken`.
    """
    found: dict[str, Callable[..., Any]] = {}
    for function in functions:
        name = base = _name_of(function)
        number = 2
        while name in found or name in taken:
            name, number = f"{base}_{number}", number + 1
        found[name] = function
    return found


def _name_of(function: Any) -> str:
    inner: Any = cast(Any, function.func) if isinstance(function, partial) else function
    has_name = isinstance(inner, FunctionType | BuiltinFunctionType | MethodType | type)
    written = f"{inner.__name__ if has_name else type(inner).__name__}"
    name = re.sub(r"\W", "", written)
    return name if name.isidentifier() and written != "<lambda>" else "reward"


# Rows.


def _row_keys(data: Any, val_data: Any, folder: Path) -> dict[str, Any]:
    if is_dataset_dict(data):
        data, held_out = splits(data)
        val_data = held_out if val_data is None else val_data
    keys: dict[str, Any] = {}
    for key, value, stem, field in (
        ("data.train_files", data, "train", "data"),
        ("data.val_files", val_data, "validation", "val_data"),
    ):
        if value is None:
            continue
        if are_addresses(value):
            listed = [value] if isinstance(value, str | Path) else list(cast(list[Any], value))
            keys[key] = [str(one) for one in listed]
        else:
            keys[key] = [str(write_rows(value, folder, stem, field=field))]
    return keys


# Tools.


def _tool_keys(tools: Any, folder: Path) -> dict[str, Any]:
    from luyen.rollout.tools.python_tools import ClassTool, FunctionTool, tool, tool_class

    listed: list[Any] = list(tools) if isinstance(tools, list | tuple) else [tools]
    made: dict[str, FunctionTool | ClassTool] = {}
    members: dict[str, Any] = {}
    lines = ["import luyen as _luyen"]
    for one in listed:
        if isinstance(one, FunctionTool | ClassTool):
            inner: Any = one.function if isinstance(one, FunctionTool) else one.cls
            _refuse_processes(one)
            found, named = one, one.options()
        elif inspect.isroutine(one) or inspect.isclass(one):
            inner, named = one, {}
            found = tool_class(one) if inspect.isclass(one) else tool(one)
        else:
            fix = "give functions with types and docstrings, or tools of luyen.tool"
            raise UserError("tools", repr(one)[:80], "it is no tool", fix)
        name = inner.__name__
        if name in made:
            why = "two tools are functions or classes of this name, and a file holds one"
            raise UserError("tools", name, why, "rename one of the two")
        made[name], members[name] = found, inner
        value = f"globals().pop({name!r})"  # from where it is defined to its place in the list
        words = ", ".join(f"{key}={given!r}" for key, given in named.items())
        kind = "tool_class" if inspect.isclass(inner) else "tool"
        value = f"_luyen.{kind}({words})({value})"
        lines.append(f"{name} = {value}")
    end = "\n\n" + "\n".join(lines) + "\n"
    file = write_objects(folder, "tools", members, end=end, live=made)
    return {f"{_TURNS}.enable": True, f"{_TURNS}.function_tool_path": str(file.path)}


def _refuse_processes(one: Any) -> None:
    """A UserError for a tool that other processes would have to import from a script."""
    from luyen.rollout.tools.python_tools import FunctionTool

    if isinstance(one, FunctionTool) and one.in_process and one.function.__module__ == "__main__":
        why = "it runs in other processes, and this one's own script cannot be imported there"
        fix = f"move it to a Python file and set {_TURNS}.function_tool_path, or drop in_process"
        raise UserError("tools", one.name, why, fix)


# Models.


def _model_keys(model: Any, tokenizer: Any, folder: Path) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    if isinstance(model, str | Path):
        keys["actor_rollout_ref.model.path"] = str(model)
    if isinstance(tokenizer, str | Path):
        keys["actor_rollout_ref.model.tokenizer_path"] = str(tokenizer)
    if model is not None and not isinstance(model, str | Path):
        _demand_model(model)
        keys["actor_rollout_ref.model.path"] = str(_saved("model", [model, tokenizer], folder))
        if tokenizer is None:
            keys["actor_rollout_ref.model.tokenizer_path"] = _origin_of(model)
    elif tokenizer is not None and not isinstance(tokenizer, str | Path):
        keys["actor_rollout_ref.model.tokenizer_path"] = str(
            _saved("tokenizer", [tokenizer], folder)
        )
    return keys


def _demand_model(model: Any) -> None:
    library = sys.modules.get("transformers")
    if library is not None and isinstance(model, library.PreTrainedModel):
        return
    why = "it is no model of transformers"
    fix = "give a path, a name on the hub or a PreTrainedModel; of a peft model, merge_and_unload()"
    raise UserError("model", type(model).__name__, why, fix)


def _origin_of(model: Any) -> str:
    """Where a loaded model came from, whose tokenizer is taken."""
    name = str(model.name_or_path)
    if not name:
        why = "the model was not loaded from a folder or the hub, so its tokenizer is not known"
        raise UserError("tokenizer", None, why, "give it: luyen.train(model=..., tokenizer=...)")
    return name


def _saved(stem: str, parts: Sequence[Any], folder: Path) -> Path:
    """A folder `STEM-DIGEST` with what the objects save of themselves."""
    from luyen.models.export import disk_errors

    folder.mkdir(parents=True, exist_ok=True)
    unfinished = temporary_path(folder / stem)
    for part in parts:
        if part is not None and not isinstance(part, str | Path):
            with writing(unfinished, field=stem), disk_errors():
                part.save_pretrained(str(unfinished))
    digest = hashlib.blake2b(digest_size=6)
    for file in sorted(path for path in unfinished.rglob("*") if path.is_file()):
        digest.update(file.name.encode())
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "blake2b").digest())
    place = (folder / f"{stem}-{digest.hexdigest()}").absolute()
    if place.is_dir():
        shutil.rmtree(unfinished)
    else:
        unfinished.rename(place)
    return place


# Callbacks.


def split_callbacks(given: Sequence[Any]) -> tuple[list[Callback], dict[str, Any]]:
    """The callbacks, and the keys that stand for an `EarlyStopping` among them.

    Early stopping is a part of the configuration: `check` sees it, and a run that goes on has it.

    Example:
        >>> split_callbacks([EarlyStopping(metric="reward/mean")])[1]["trainer.early_stopping.mode"]
        'max'
    """
    if not isinstance(cast(object, given), list | tuple):
        fix = "give a list: callbacks=[...]"
        raise UserError("callbacks", type(given).__name__, "it is no list of callbacks", fix)
    rules = [one for one in given if isinstance(one, EarlyStopping)]
    if len(rules) > 1:
        why = "a run has one metric that stops it"
        raise UserError("callbacks", "EarlyStopping", why, "give one EarlyStopping")
    keys = {
        f"trainer.early_stopping.{name}": value
        for one in rules
        for name, value in asdict(one).items()
    }
    return demand_callbacks([one for one in given if not isinstance(one, EarlyStopping)]), keys


def overrides_of(keys: Mapping[str, Any]) -> list[str]:
    """Keys and values as `key=value`.

    Example:
        >>> overrides_of({"data.train_files": ["a.jsonl"]})
        ['data.train_files=["a.jsonl"]']
    """
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]
