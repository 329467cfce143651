"""Reward functions of the user: loaded from a file once, called by our convention or TRL's."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, SupportsIndex, cast, final

from luyen.base.boundary import boundary, last_line
from luyen.base.errors import UserError, did_you_mean
from luyen.base.records import Prompt, Rollout, Source
from luyen.base.user_modules import module_name


def load_module(path: str, *, field: str) -> ModuleType:
    """The module of a file, loaded at most once; a UserError about `field` when it cannot be."""
    file = Path(path).expanduser().resolve()
    for module in list(sys.modules.values()):
        if vars(module).get("__file__") == str(file):
            return module
    name = module_name(file)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise UserError(field, path, "no such Python file", "correct the path")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    faults: list[BaseException] = []
    with boundary(faults):
        spec.loader.exec_module(module)
    if faults:
        sys.modules.pop(name, None)
        if isinstance(faults[0], UserError):
            raise faults[0]
        why = f"importing it failed: {last_line(faults[0])}"
        raise UserError(field, path, why, "correct the file") from faults[0]
    return module


def load_function(path: str, name: str, *, field: str) -> Callable[..., Any]:
    """A function of a file; a UserError with near names when there is none."""
    module = load_module(path, field=f"{field}.path")
    found = vars(module).get(name)
    if callable(found):
        return found
    functions = [n for n, value in vars(module).items() if inspect.isfunction(value)]
    why = f"{path} defines no function of this name"
    raise UserError(f"{field}.name", name, why, did_you_mean(name, functions))


def takes(function: Callable[..., Any], names: Sequence[str]) -> bool:
    """Whether a function can be called with exactly these keyword arguments."""
    try:
        inspect.signature(function).bind(**dict.fromkeys(names))
    except TypeError:
        return False
    return True


# TRL-style reward functions: `reward(prompts, completions, completion_ids, **columns)`.
#
# It returns a list with a score per answer: of one answer, or of all of a step where
# `reward.reward_manager.name` is `batch`. It is given what it takes of these, each a list:
# `completions`, `prompts` (messages), `completion_ids`, `ground_truth`, `data_source`, and
# every other column; `answer` and `solution` are the ground truth where rows have no such
# columns. `extra_info` has all other columns of an answer as one mapping, for a function that names
# it.

COMPLETIONS, INFO = "completions", "extra_info"
_TRUTH = ("answer", "solution")


@final
class TrlCompletion(str):
    """The text of an answer, which reads as TRL's conversation of one message besides.

    Example:
        >>> TrlCompletion("42")[0]["content"], len(TrlCompletion("42"))
        ('42', 2)
    """

    def __getitem__(self, at: SupportsIndex | slice) -> str:
        """Characters, as of any text; the first and the last one are a message, too."""
        if isinstance(at, slice) or at.__index__() not in (0, -1):
            return super().__getitem__(at)
        return _Message(super().__getitem__(at) if self else "", content=str(self))


@final
class _Message(str):
    """A character that has the fields of the assistant's message."""

    def __new__(cls, character: str, *, content: str) -> "_Message":
        made = super().__new__(cls, character)
        made.fields = {"role": "assistant", "content": content}
        return made

    fields: dict[str, str]

    def __getitem__(self, at: Any) -> str:
        return self.fields[at] if isinstance(at, str) else super().__getitem__(at)


def is_trl(function: Callable[..., Any]) -> bool:
    """Whether a function has TRL's signature: a parameter `completions`.

    Example:
        >>> is_trl(lambda completions, **kwargs: [0.0]), is_trl(lambda solution_str: 0.0)
        (True, False)
    """
    try:
        return COMPLETIONS in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def called_as_ours(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of TRL's signature for one answer: lists of one go in, and its score comes out.

    Any other function comes back as it is.
    """
    if not is_trl(function):
        return function

    @wraps(function)
    def one(**columns: Any) -> Any:
        returned = function(**with_messages(columns))
        is_one = isinstance(returned, list | tuple) and len(cast(list[Any], returned)) == 1
        return cast(list[Any], returned)[0] if is_one else returned

    return one


def with_messages(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, with completions that read as text and as messages."""
    return {**columns, COMPLETIONS: [TrlCompletion(text) for text in columns[COMPLETIONS]]}


def arguments_of(
    function: Callable[..., Any],
    answers: Sequence[tuple[Prompt, Rollout]],
    infos: Sequence[Mapping[str, Any]],
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """What the function takes of all that is known about the answers, each a list of plain data."""
    truths = [prompt.ground_truth for prompt, _ in answers]
    names = dict.fromkeys(name for info in infos for name in info)
    columns = {
        **dict.fromkeys(_TRUTH, truths),
        **{name: [info.get(name) for info in infos] for name in names},
        "ground_truth": truths,
        "data_source": [prompt.data_source for prompt, _ in answers],
        "prompts": [[dict(message) for message in prompt.messages] for prompt, _ in answers],
        COMPLETIONS: [rollout.text for _, rollout in answers],
        "completion_ids": [_sampled(rollout) for _, rollout in answers],
        **more,
    }
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return columns | ({INFO: infos} if INFO in parameters else {})
    return {n: v for n, v in {INFO: infos, **columns}.items() if n in parameters}


def _sampled(rollout: Rollout) -> list[int]:
    pairs = zip(rollout.tokens, rollout.sources, strict=True)
    return [token for token, source in pairs if source is Source.SAMPLED]
