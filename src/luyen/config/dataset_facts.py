"""What is known of rows before they are read: files, kinds, sampler arguments, template."""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from luyen.base.errors import UserError, did_you_mean
from luyen.base.input_files import exists, expanded, is_directory, require_file
from luyen.config.plan import PreferenceLosses
from luyen.config.schema.data import DataConfig
from luyen.config.schema.run import RunConfig
from luyen.config.task_urls import FIELD, parse_task_url, read_arithmetic, read_tool_task

ENDINGS = (".parquet", ".json", ".jsonl")
TABLE = ".csv"
"""Read where rows are learned from as they are, and by `luyen data`."""
SAVED_ONE, SAVED_SEVERAL = "state.json", "dataset_dict.json"
"""What `save_to_disk` leaves in a directory."""


def row_files(address: str, *, tables: bool = False) -> list[Path]:
    """The files in which the rows are, in order; a dataset that was saved is one directory.

    A UserError where there is none, or one that is no file, is empty, or has another ending. With
    `tables`, CSV files count too, in a directory without other files of rows.
    """
    path = expanded(address)
    if not exists(address):
        raise UserError(FIELD, address, "no such file on this machine", "correct the path")
    if not is_directory(address):
        return [_readable(path, (*ENDINGS, TABLE) if tables else ENDINGS)]
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise UserError(FIELD, address, f"cannot be read: {error}", "make it readable") from error
    if SAVED_SEVERAL in names:
        splits = [name for name in names if (path / name / SAVED_ONE).is_file()]
        fix = " or ".join(str(path / split) for split in splits)
        raise UserError(FIELD, address, "the directory holds several splits", f"name one: {fix}")
    if SAVED_ONE in names:
        return [path]
    found = [name for name in names if name.lower().endswith(ENDINGS)]
    if tables and not found:
        found = [name for name in names if name.lower().endswith(TABLE)]
    if not found:
        why = "the directory holds neither a saved dataset nor files of rows"
        raise UserError(FIELD, str(path), why, f"add files ending in {', '.join(ENDINGS)}")
    return [_readable(path / name, (*ENDINGS, TABLE)) for name in found]


def _readable(path: Path, endings: tuple[str, ...]) -> Path:
    if path.suffix.lower() not in endings:
        why = f"no reader for files that end in `{path.suffix}`"
        raise UserError(FIELD, str(path), why, did_you_mean(path.suffix, endings))
    try:
        size = require_file(path).stat().st_size
    except OSError as error:
        raise UserError(FIELD, str(path), f"cannot be read: {error}", "correct the path") from error
    if not size:
        raise UserError(FIELD, str(path), "there are no rows in it", "add rows, or remove it")
    return path


# Kinds of rows: what an address gives, and which kinds a stage accepts.

_KIND_BY_SUPERVISION = {
    None: "prompts",
    "traces": "conversation",
    "pairs": "preference",
    "labels": "labelled",
    "steps": "stepped",
}
_OBJECTIVES = {"bradley_terry": "preference", "regression": "labelled", "process": "stepped"}
QUERIES = {
    "prompts": "no `traces`, `pairs`, `labels` or `steps`",
    "conversation": "`traces=1`",
    "preference": "`pairs=even`",
    "labelled": "`labels=even`",
    "stepped": "`steps=1`",
}
"""Kind of rows -> what makes `arithmetic://sum` give them."""


def kind_of_task(address: str) -> str | None:
    """The kind of the rows of an address that makes sense; None where only its rows show it.

    Example:
        >>> kind_of_task("arithmetic://sum?pairs=even"), kind_of_task("hf://org/rows")
        ('preference', None)
    """
    url = parse_task_url(address)
    match url.scheme:
        case "arithmetic":
            return _KIND_BY_SUPERVISION[read_arithmetic(url).taught]
        case "tools":
            return "conversation" if read_tool_task(url).traces else "prompts"
        case "reasoning_gym":
            return "prompts"
        case _:
            return None


def kinds_learned(config: RunConfig, losses: PreferenceLosses) -> tuple[str, ...]:
    """Kinds of addresses that the stage of a run finds something to learn in.

    Example:
        >>> kinds_learned(RunConfig(), {})
        ('prompts',)
    """
    match config.trainer.stage:
        case "rl":
            return ("prompts",)
        case "sft" | "distill":
            return ("conversation",)
        case "reward_model":
            return (_OBJECTIVES[config.reward_training.objective],)
        case "preference":
            facts = losses.get(next(iter(config.preference.loss_type), ""))
            is_paired = facts is None or facts.kind == "pair"
            return ("preference",) if is_paired else ("labelled", "preference")


# Checks of a built-in sampler's arguments against the rows, as far as those are known.

_STAGES = 4
"""Default number of stages of a curriculum."""
_NUMBERS = ("difficulty", "index")
"""Numeric columns of a question of `arithmetic://`."""


def sampler_faults(data: DataConfig) -> Iterator[str]:
    """What is wrong with arguments that are of their kinds.

    Example:
        >>> from luyen.config.schema.data import SamplerConfig
        >>> mixed = SamplerConfig(name="mixed", kwargs={"weights": {"arithmetic/sum": 0}})
        >>> list(sampler_faults(DataConfig(train_files=("arithmetic://sum",), sampler=mixed)))
        ['weights: all of them are 0']
    """
    sampler, addresses = data.sampler, data.train_files
    if sampler.name == "mixed":
        weights = cast(Mapping[str, float], sampler.kwargs.get("weights", {}))
        yield from _weight_faults(weights, _sources(addresses))
    if sampler.name == "curriculum":
        yield from _stage_faults(data)


def _weight_faults(weights: Mapping[str, float], sources: set[str] | None) -> Iterator[str]:
    for name, weight in weights.items():
        if weight < 0:
            yield f"weights: that of `{name}` is negative"
        if sources is not None and name not in sources:
            yield f"weights: no row has the data source `{name}`, but {', '.join(sorted(sources))}"
    if not any(weight > 0 for weight in weights.values()):
        yield "weights: all of them are 0" if weights else "weights: there are none"
    for name in sorted((sources or set()) - weights.keys()):
        yield f"weights: rows of `{name}` have none; 0 leaves them out"


def _stage_faults(data: DataConfig) -> Iterator[str]:
    given, addresses = data.sampler.kwargs, data.train_files
    key, stages = given.get("key"), given.get("stages", _STAGES)
    if stages < 1:
        yield f"stages: {stages} is none; 1 or more are"
    is_ours = bool(addresses) and all(path.startswith("arithmetic://") for path in addresses)
    if is_ours and key is not None and key not in _NUMBERS:
        yield f"key: rows of {addresses[0]} have no number `{key}`, but {', '.join(_NUMBERS)}"
    rows = _rows(data) if is_ours else None
    if rows is not None and data.train_max_samples >= 0:
        rows = min(rows, data.train_max_samples)
    if rows is not None and stages > rows:
        yield f"stages: {rows} rows make from 1 to {rows} stages, and there are {stages}"


def _rows(data: DataConfig) -> int | None:
    try:
        sizes = [read_arithmetic(parse_task_url(path)).questions.size for path in data.train_files]
    except UserError:
        return None  # D02 says why
    limits = data.train_file_samples or (-1,) * len(sizes)
    return sum(
        size if most < 0 else min(size, most) for size, most in zip(sizes, limits, strict=False)
    )


def _sources(addresses: Sequence[str]) -> set[str] | None:
    """Data sources of the rows; None where only the rows show them."""
    if not all(path.startswith("arithmetic://") for path in addresses):
        return None
    return {path.partition("?")[0].replace("://", "/").rstrip("/") for path in addresses}


# Mixtures: several training files with weights.


def share_names(data: DataConfig) -> list[str]:
    """Names of the entries of `data.train_files` in metrics, one each.

    Example:
        >>> share_names(DataConfig(train_files=("a/sums.jsonl", "arithmetic://sum?digits=2")))
        ['sums.jsonl', 'sum_digits_2']
    """
    given = data.train_names or data.train_files
    names = [re.sub(r"[^\w.-]+", "_", path.rstrip("/").rpartition("/")[2]) for path in given]
    return [name if names.count(name) == 1 else f"{name}-{i}" for i, name in enumerate(names)]


_LEAST_SHARE = 1e-15
"""Of a file in a mixture: below it the places of its rows have no floats."""
_LONGEST_NAME = 200
"""Characters of the name of a training file in metrics."""


def mixture_faults(data: DataConfig) -> Iterator[tuple[str, str, str]]:
    """(key, reason, fix) of what is wrong with weights, names and counts of files.

    Example:
        >>> list(mixture_faults(DataConfig(train_files=("a",), train_weights=(-1,))))
        [('train_weights', 'a weight is negative', 'give 0 or more')]
    """
    lists = {
        "train_weights": data.train_weights,
        "train_file_samples": data.train_file_samples,
        "train_names": data.train_names,
    }
    files = len(data.train_files)
    for key, values in lists.items():
        if values and len(values) != files:
            why = f"it has {len(values)} values, and data.train_files has {files} entries"
            yield key, why, "give one value for every entry"
    if any(weight < 0 for weight in data.train_weights):
        yield "train_weights", "a weight is negative", "give 0 or more"
    elif data.train_weights and not any(data.train_weights):
        yield "train_weights", "all of them are 0: no row would be taken", "raise one"
    elif data.train_weights and _are_too_far_apart(data.train_weights):
        why = "a file would get a row in 1e15 or fewer, or their sum is no number"
        yield "train_weights", why, "give weights that are nearer to each other, or 0"
    if data.train_weights and files > 1 and data.train_max_samples >= 0:
        why = "it keeps the first rows of all files together: nothing may be left of later ones"
        yield "train_max_samples", why, "use data.train_file_samples, with a number for each"
    if any(most == 0 or most < -1 for most in data.train_file_samples):
        yield "train_file_samples", "no row of a file would be left", "give -1 or 1 and more"
    if len(set(data.train_names)) < len(data.train_names):
        yield "train_names", "two entries have the same name", "give each a name of its own"
    if any(not name.strip() or len(name) > _LONGEST_NAME for name in data.train_names):
        why = f"a name is empty, or longer than {_LONGEST_NAME} characters"
        yield "train_names", why, "give each entry a short name"


def _are_too_far_apart(weights: Sequence[float]) -> bool:
    total = sum(weights)
    return not math.isfinite(total) or min(w for w in weights if w > 0) / total < _LEAST_SHARE


# The text of `data.prompt_template`: which columns it names, and what it says with them filled
# in.
#
# `{name}` is a column and `{{name}}` is `{name}` as it stands. Braces around anything but a
# name stay as they are, so that `\boxed{}` needs no care.

PROMPT = "prompt"
"""The name under which every template can name the text of the prompt."""
_NAME = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")


def template_columns(template: str) -> list[str]:
    """Columns that a template names.

    Example:
        >>> template_columns("{question} Put it into \\\\boxed{}, as {{this}}.")
        ['question']
    """
    return [found[2] for found in _NAME.finditer(template) if found[2] is not None]


def fill_template(template: str, value_of: Callable[[str], str]) -> str:
    """The template with the text of each column that it names.

    Example:
        >>> fill_template("{a} is {{a}}, \\\\boxed{}", str.upper)
        'A is {a}, \\\\boxed{}'
    """
    return _NAME.sub(lambda found: value_of(found[2]) if found[2] else f"{{{found[1]}}}", template)
