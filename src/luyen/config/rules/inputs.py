"""D: rows and rewards: files that must be there before anything starts."""

import ast
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from luyen.base.errors import UserError
from luyen.base.paths import expanded
from luyen.base.suggest import did_you_mean
from luyen.config.plugins import SAMPLER_KNOBS, SAMPLER_NEEDS, SOURCE_PACKAGES, SOURCES
from luyen.config.prompt_template import names_in
from luyen.config.python_file import arguments_of, read_python
from luyen.config.row_files import row_files
from luyen.config.rules.rule import Finding, Situation, rule
from luyen.config.sampler_values import sampler_faults
from luyen.config.task_sources import require_task


@rule("D01", "error")
def training_rows_are_named(s: Situation) -> Iterator[Finding]:
    """`data.train_files` names what to train on."""
    if not s.config.data.train_files:
        yield Finding(
            field="data.train_files",
            why="required, and not set",
            fix="give parquet, JSON or JSONL files, or a task source such as arithmetic://sum",
        )


@rule("D02", "error")
def data_files_exist(s: Situation) -> Iterator[Finding]:
    """Data files that are named are there and may hold rows; addresses of tasks make sense."""
    data = s.config.data
    for field, paths in (("train_files", data.train_files), ("val_files", data.val_files)):
        for path in paths:
            scheme, is_source, _ = path.partition("://")
            if is_source and scheme not in SOURCES:
                fix = did_you_mean(scheme, SOURCES)
                yield Finding(field=f"data.{field}", why=f"no task source `{scheme}://`", fix=fix)
                continue
            try:
                if is_source:
                    require_task(path)
                else:
                    row_files(path, tables=s.config.trainer.stage != "rl")
            except UserError as error:
                why = f"{error.value}: {error.why}"
                yield Finding(field=f"data.{field}", why=why, fix=error.fix)


@rule("D03", "warning")
def validation_rows_are_others(s: Situation) -> Iterator[Finding]:
    """Validation rows are not the training rows."""
    data = s.config.data
    both = sorted(set(data.train_files) & set(data.val_files))
    if both:
        why = f"{both[0]} is trained on and validated on: the score says nothing about new rows"
        yield Finding(field="data.val_files", why=why, fix="hold some rows out")


@rule("D04", "error")
def sampler_class_is_there(s: Situation) -> Iterator[Finding]:
    """A sampler of your own is a class in a file, and both are named."""
    sampler = s.config.data.sampler
    if (sampler.class_path is None) != (sampler.class_name is None):
        missing = "class_name" if sampler.class_name is None else "class_path"
        why = "a sampler of your own needs a file and the name of a class in it"
        yield Finding(field=f"data.sampler.{missing}", why=why, fix=f"set data.sampler.{missing}")
    elif sampler.class_path is not None and sampler.class_name is not None:
        yield from _defined("data.sampler", "class", sampler.class_path, sampler.class_name)


@rule("D05", "error")
def reward_function_is_there(s: Situation) -> Iterator[Finding]:
    """A reward function of your own is defined in its file."""
    custom_reward_function = s.config.reward.custom_reward_function
    if custom_reward_function.path is not None:
        block = "reward.custom_reward_function"
        path, name = custom_reward_function.path, custom_reward_function.name
        yield from _defined(block, "", path, name)
        for knob in _refused_names(path, name, custom_reward_function.reward_kwargs):
            why, fix = (
                f"`{name}` takes no argument `{knob}`",
                "drop it, or let the function take it",
            )
            yield Finding(field=f"{block}.reward_kwargs", why=why, fix=fix)


def _refused_names(path: str, function: str, names: Iterable[str]) -> list[str]:
    """Names that a function of a file takes as no argument, by its signature."""
    found = arguments_of(path, function)
    return [] if found is None else [n for n in names if not found.takes(n)]


def _defined(block: str, prefix: str, path: str, name: str) -> Iterator[Finding]:
    """Findings unless the file exists, is Python, and defines the name at its top."""
    head = f"{block}.{prefix}_" if prefix else f"{block}."
    try:
        tree = read_python(expanded(path))
    except OSError as error:
        yield Finding(field=f"{head}path", why=str(error), fix="mend the path or the file")
        return
    defined = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    if name not in defined:
        why = f"{path} defines no `{name}`"
        yield Finding(field=f"{head}name", why=why, fix=did_you_mean(name, defined))


@rule("D06", "error")
def reward_manager_exists(s: Situation) -> Iterator[Finding]:
    """`reward_manager.name` is a registered name."""
    reward_manager = s.config.reward.reward_manager
    if reward_manager.name not in s.known.reward_managers:
        fix = did_you_mean(reward_manager.name, s.known.reward_managers)
        field = "reward.reward_manager.name"
        yield Finding(field=field, why="no such reward manager is registered", fix=fix)


@rule("D09", "warning")
def truncation_is_reached(s: Situation) -> Iterator[Finding]:
    """`truncation` is chosen only where overlong prompts are not dropped before."""
    data = s.config.data
    if data.filter_overlong_prompts and data.truncation != "error":
        why = "filter_overlong_prompts drops long prompts first: nothing is left to truncate"
        fix = "set filter_overlong_prompts=false, or drop truncation"
        yield Finding(field="data.truncation", why=why, fix=fix)


@rule("D10", "error")
def sampler_exists(s: Situation) -> Iterator[Finding]:
    """`data.sampler.name` is a registered name, and it gets the arguments that it takes."""
    sampler = s.config.data.sampler
    if sampler.class_path is not None:
        return
    if sampler.name not in s.known.samplers:
        fix = did_you_mean(sampler.name, s.known.samplers)
        yield Finding(field="data.sampler.name", why="no such sampler is registered", fix=fix)
    needed = SAMPLER_NEEDS.get(sampler.name)
    if needed is not None and needed not in sampler.kwargs:
        why = f"the sampler `{sampler.name}` cannot do without `{needed}`"
        yield Finding(field="data.sampler.kwargs", why=why, fix=f"set data.sampler.kwargs.{needed}")
    if sampler.name in SAMPLER_KNOBS:
        wrong = list(_wrong_arguments(sampler.kwargs, SAMPLER_KNOBS[sampler.name]))
        yield from wrong
        for why in sampler_faults(s.config.data) if not wrong else ():
            yield Finding(field="data.sampler.kwargs", why=why, fix="mend it")


def _wrong_arguments(given: Mapping[str, Any], known: Mapping[str, str]) -> Iterator[Finding]:
    for name, value in given.items():
        if name not in known:
            why, fix = f"`{name}`: the sampler takes no such argument", did_you_mean(name, known)
            yield Finding(field="data.sampler.kwargs", why=why, fix=fix)
        elif not _is_kind(value, known[name]) and (value is not None or name != "promote_at"):
            why = f"`{name}`: expected {known[name]}"
            yield Finding(field="data.sampler.kwargs", why=why, fix=f"mend {name}")


def _is_kind(value: object, kind: str) -> bool:
    """Whether a value is what the words say."""
    if kind == "a mapping of numbers":
        numbers = cast(dict[str, object], value).values() if isinstance(value, dict) else [None]
        return all(_is_kind(number, "a number") for number in numbers)
    types = {"a whole number": int, "a name": str, "a number": int | float}
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return isinstance(value, types[kind]) and not isinstance(value, bool) and is_finite


@rule("D11", "warning")
def sampler_name_has_effect(s: Situation) -> Iterator[Finding]:
    """`data.sampler.name` is chosen only where no class of your own takes its place."""
    if s.config.data.sampler.class_path is not None and s.is_changed("data.sampler.name"):
        why = "data.sampler.class_path is set, and its class draws the rows"
        yield Finding(field="data.sampler.name", why=why, fix="drop one of the two")


@rule("D12", "error")
def packages_of_sources_are_installed(s: Situation) -> Iterator[Finding]:
    """The package that a source of rows needs is installed."""
    data = s.config.data
    for field, paths in (("train_files", data.train_files), ("val_files", data.val_files)):
        for scheme in sorted({path.partition("://")[0] for path in paths if "://" in path}):
            package, extra = SOURCE_PACKAGES.get(scheme, (None, None))
            if package is not None and not s.installed(package):
                why = f"`{scheme}://` needs the package {package}, which is not installed here"
                fix = f'install it: pip install "luyen[{extra}]"'
                yield Finding(field=f"data.{field}", why=why, fix=fix)


@rule("D13", "error")
def template_shows_the_row(s: Situation) -> Iterator[Finding]:
    """`data.prompt_template` names a column, so that rows do not all ask the same."""
    template = s.config.data.prompt_template
    if template is not None and not names_in(template):
        why = "no `{COLUMN}` stands in it: every row would ask the same"
        yield Finding(field="data.prompt_template", why=why, fix="write {prompt} into it")
