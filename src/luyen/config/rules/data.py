"""D: training and validation rows, samplers and reward files exist and fit the stage."""

import ast
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from luyen.base.errors import UserError, did_you_mean, shortened
from luyen.base.input_files import expanded
from luyen.config.dataset_facts import (
    QUERIES,
    kind_of_task,
    kinds_learned,
    mixture_faults,
    row_files,
    sampler_faults,
    template_columns,
)
from luyen.config.plugins import (
    SAMPLER_ARGUMENTS,
    SAMPLER_NEEDS,
    SOURCE_PACKAGES,
    SOURCES,
    arguments_of,
    read_python,
)
from luyen.config.python_objects import absent_object, is_loaded
from luyen.config.rules.rule import Finding, RuleContext, rule
from luyen.config.task_urls import require_task


@rule("D01", "error")
def training_rows_are_named(s: RuleContext) -> Iterator[Finding]:
    """`data.train_files` names what to train on."""
    if not s.config.data.train_files:
        yield Finding(
            field="data.train_files",
            why="required, and not set",
            fix="give parquet, JSON or JSONL files, or a task source such as arithmetic://sum",
        )


@rule("D02", "error")
def data_files_exist(s: RuleContext) -> Iterator[Finding]:
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


@rule("D21", "error")
def first_rows_can_be_read(s: RuleContext) -> Iterator[Finding]:
    """The first row of every file is one that the stage reads."""
    data = s.config.data
    for field, paths in (("train_files", data.train_files), ("val_files", data.val_files)):
        for path in paths:
            error = s.row_error(s.config, path)
            if error is not None:
                said = f"{error.field} = {shortened(error.value)!r}: {error.why}"
                yield Finding(field=f"data.{field}", why=said, fix=error.fix)


@rule("D03", "warning")
def validation_rows_are_others(s: RuleContext) -> Iterator[Finding]:
    """Validation rows are not the training rows."""
    data = s.config.data
    both = sorted(set(data.train_files) & set(data.val_files))
    if both:
        why = f"{both[0]} is trained on and validated on: the score says nothing about new rows"
        yield Finding(field="data.val_files", why=why, fix="hold some rows out")


@rule("D18", "error")
def mixture_fits_the_files(s: RuleContext) -> Iterator[Finding]:
    """Weights, names and counts of training files are one for each, and leave rows to take."""
    for key, why, fix in mixture_faults(s.config.data):
        yield Finding(field=f"data.{key}", why=why, fix=fix)


@rule("D19", "error")
def mixture_orders_the_rows(s: RuleContext) -> Iterator[Finding]:
    """With weights of files, no sampler orders the rows besides the mixture."""
    data = s.config.data
    is_other = data.sampler.class_path is not None or data.sampler.name != "shuffled"
    if data.train_weights and is_other:
        why = "data.train_weights is set, and the mixture orders the rows: this sampler has no use"
        yield Finding(field="data.sampler", why=why, fix="drop one of the two")


@rule("D04", "error")
def sampler_class_is_there(s: RuleContext) -> Iterator[Finding]:
    """A sampler of your own is a class in a file, and both are named."""
    sampler = s.config.data.sampler
    if (sampler.class_path is None) != (sampler.class_name is None):
        missing = "class_name" if sampler.class_name is None else "class_path"
        why = "a sampler of your own needs a file and the name of a class in it"
        yield Finding(field=f"data.sampler.{missing}", why=why, fix=f"set data.sampler.{missing}")
    elif sampler.class_path is not None and sampler.class_name is not None:
        yield from _defined("data.sampler", "class", sampler.class_path, sampler.class_name)


@rule("D05", "error")
def reward_function_is_there(s: RuleContext) -> Iterator[Finding]:
    """A reward function of your own is defined in its file."""
    custom_reward_function = s.config.reward.custom_reward_function
    if custom_reward_function.path is not None and s.config.trainer.stage == "rl":
        block = "reward.custom_reward_function"
        path, name = custom_reward_function.path, custom_reward_function.name
        yield from _defined(block, "", path, name)
        for hparam in _refused_names(path, name, custom_reward_function.reward_kwargs):
            why, fix = (
                f"`{name}` takes no argument `{hparam}`",
                "drop it, or let the function take it",
            )
            yield Finding(field=f"{block}.reward_kwargs", why=why, fix=fix)
        yield from _called_otherwise(s, path, name)


_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What a reward function is called with, by keyword."""


def _called_otherwise(s: RuleContext, path: str, name: str) -> Iterator[Finding]:
    """A finding where a function cannot be called as it will be; TRL's take `completions`."""
    found, reward = arguments_of(path, name), s.config.reward
    # The manager `batch` has a rule of its own, and so have names that the function does not take.
    if found is None or reward.reward_manager.name == "batch" or "completions" in found.names:
        return
    more = [key for key in reward.custom_reward_function.reward_kwargs if found.takes(key)]
    if not found.fits([*_ARGUMENTS, *more]):
        yield Finding(
            field="reward.custom_reward_function.name",
            why=f"{path} defines `{name}` with other arguments than it will be called with",
            fix=f"define it as {name}({', '.join(_ARGUMENTS)}), or as TRL does: "
            f"{name}(completions, **columns)",
        )


def _refused_names(path: str, function: str, names: Iterable[str]) -> list[str]:
    """Names that a function of a file takes as no argument, by its signature."""
    found = arguments_of(path, function)
    return [] if found is None else [n for n in names if not found.takes(n)]


def _defined(block: str, prefix: str, path: str, name: str) -> Iterator[Finding]:
    """Findings unless the file exists, is Python, and defines or imports the name at its top."""
    head = f"{block}.{prefix}_" if prefix else f"{block}."
    try:
        tree = read_python(expanded(path))
    except OSError as error:
        yield Finding(field=f"{head}path", why=str(error), fix="correct the path or the file")
        return
    defined = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    defined += [one.asname or one.name for node in imports for one in node.names]
    if name not in defined:
        why = f"{path} defines no `{name}`"
        yield Finding(field=f"{head}name", why=why, fix=did_you_mean(name, defined))


@rule("D06", "error")
def reward_manager_exists(s: RuleContext) -> Iterator[Finding]:
    """`reward_manager.name` is a registered name."""
    reward_manager = s.config.reward.reward_manager
    if reward_manager.name not in s.known.reward_managers:
        fix = did_you_mean(reward_manager.name, s.known.reward_managers)
        field = "reward.reward_manager.name"
        yield Finding(field=field, why="no such reward manager is registered", fix=fix)


@rule("D09", "warning")
def truncation_is_reached(s: RuleContext) -> Iterator[Finding]:
    """`truncation` is chosen only where overlong prompts are not dropped before."""
    data = s.config.data
    if data.filter_overlong_prompts and data.truncation != "error":
        why = "filter_overlong_prompts drops long prompts first: nothing is left to truncate"
        fix = "set filter_overlong_prompts=false, or drop truncation"
        yield Finding(field="data.truncation", why=why, fix=fix)


@rule("D20", "note")
def overlong_prompts_are_left_out(s: RuleContext) -> Iterator[Finding]:
    """Prompts that are too long are dropped before training; otherwise they end it, or are cut."""
    data, is_multi_turn = s.config.data, s.config.actor_rollout_ref.rollout.multi_turn.enable
    is_error = is_multi_turn and data.truncation != "error"  # which T02 says
    if data.filter_overlong_prompts or is_error or s.config.trainer.stage != "rl":
        return
    why = f"a single prompt of more than {data.max_prompt_length} tokens refuses the run"
    if data.truncation != "error":
        why = f"prompts of more than {data.max_prompt_length} tokens lose their {data.truncation}"
        why += ", and what is asked may be there"
    fix = "set it to true before scaling up: such rows are dropped and counted"
    yield Finding(field="data.filter_overlong_prompts", why=why, fix=fix)


@rule("D10", "error")
def sampler_exists(s: RuleContext) -> Iterator[Finding]:
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
    if sampler.name in SAMPLER_ARGUMENTS:
        wrong = list(_wrong_arguments(sampler.kwargs, SAMPLER_ARGUMENTS[sampler.name]))
        yield from wrong
        for why in sampler_faults(s.config.data) if not wrong else ():
            yield Finding(field="data.sampler.kwargs", why=why, fix="correct the value")


def _wrong_arguments(given: Mapping[str, Any], known: Mapping[str, str]) -> Iterator[Finding]:
    for name, value in given.items():
        if name not in known:
            why, fix = f"`{name}`: the sampler takes no such argument", did_you_mean(name, known)
            yield Finding(field="data.sampler.kwargs", why=why, fix=fix)
        elif not _is_kind(value, known[name]) and (value is not None or name != "promote_at"):
            why = f"`{name}`: expected {known[name]}"
            yield Finding(field="data.sampler.kwargs", why=why, fix=f"set {name} to {known[name]}")


def _is_kind(value: object, kind: str) -> bool:
    """Whether a value is what the words say."""
    if kind == "a mapping of numbers":
        numbers = cast(dict[str, object], value).values() if isinstance(value, dict) else [None]
        return all(_is_kind(number, "a number") for number in numbers)
    types = {"a whole number": int, "a name": str, "a number": int | float}
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return isinstance(value, types[kind]) and not isinstance(value, bool) and is_finite


@rule("D11", "warning")
def sampler_name_has_effect(s: RuleContext) -> Iterator[Finding]:
    """`data.sampler.name` is chosen only where no class of your own takes its place."""
    if s.config.data.sampler.class_path is not None and s.is_changed("data.sampler.name"):
        why = "data.sampler.class_path is set, and its class orders the rows"
        yield Finding(field="data.sampler.name", why=why, fix="drop one of the two")


@rule("D12", "error")
def packages_of_sources_are_installed(s: RuleContext) -> Iterator[Finding]:
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
def template_shows_the_row(s: RuleContext) -> Iterator[Finding]:
    """`data.prompt_template` names a column, so that prompts differ between rows."""
    template = s.config.data.prompt_template
    if template is not None and not template_columns(template):
        why = "it has no `{COLUMN}`: every row would get the same prompt"
        yield Finding(field="data.prompt_template", why=why, fix="write {prompt} into it")


# D: rows of task sources, known before they are read.

_COLUMNS = ("data_source", "prompt", "reward_model", "extra_info")
"""What the questions of a task source have."""
_OF_RENDERING = (
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
    *("documents", "messages", "padding", "return_dict", "return_tensors", "tokenize", "tools"),
)
"""Names that the renderer, or the library below it, gives to a template."""


@rule("D17", "error")
def tasks_suit_the_stage(s: RuleContext) -> Iterator[Finding]:
    """Rows of task sources are of a kind that the stage accepts, and have the columns it needs."""
    data, stage = s.config.data, s.config.trainer.stage
    wanted = kinds_learned(s.config, s.known.preference_losses)
    for field, paths in (("train_files", data.train_files), ("val_files", data.val_files)):
        for path in paths:
            kind = _kind(path)
            if kind is not None and kind not in wanted:
                why = f"{path}: its rows are of the kind `{kind}`, and the stage `{stage}` "
                why += f"learns from {' or '.join(f'`{one}`' for one in wanted)}"
                fix = f"in an address of arithmetic://sum: {QUERIES[wanted[0]]}"
                yield Finding(field=f"data.{field}", why=why, fix=fix)
            elif kind == "preference":
                yield from _absent_margins(s, path)


def _kind(path: str) -> str | None:
    """The kind of the rows of an address; None where it is none, or makes no sense."""
    try:
        return kind_of_task(path) if path.partition("://")[0] in SOURCES else None
    except UserError:
        return None


def _absent_margins(s: RuleContext, path: str) -> Iterator[Finding]:
    stage, config = s.config.trainer.stage, s.config
    margins = {
        "preference.use_margins": stage == "preference" and config.preference.use_margins,
        "reward_training.use_margins": stage == "reward_model"
        and config.reward_training.objective == "bradley_terry"
        and config.reward_training.use_margins,
    }
    for field, is_on in margins.items():
        if is_on:
            why = f"the rows of {path} have no column `margin`"
            yield Finding(field=field, why=why, fix="set it to false, or give rows of your own")


@rule("D14", "error")
def rows_are_kept(s: RuleContext) -> Iterator[Finding]:
    """Of the rows that are read, some are kept."""
    data = s.config.data
    kept = {"train_max_samples": data.train_max_samples, "val_max_samples": data.val_max_samples}
    for name, most in kept.items():
        if most == 0:
            why, fix = "no row would be left", "set it to -1 for all rows, or to 1 or more"
            yield Finding(field=f"data.{name}", why=why, fix=fix)


@rule("D15", "error")
def template_arguments_are_free(s: RuleContext) -> Iterator[Finding]:
    """Arguments of the chat template are not those that every rendering sets itself."""
    for name in s.config.data.apply_chat_template_kwargs:
        if name in _OF_RENDERING:
            why = f"`{name}` is set by the row and by what is rendered of it"
            field = "data.apply_chat_template_kwargs"
            yield Finding(field=field, why=why, fix=f"drop {name}")


@rule("D16", "error")
def columns_of_tasks_are_there(s: RuleContext) -> Iterator[Finding]:
    """Columns that are named are among those that the rows of task sources have."""
    data = s.config.data
    named = {
        "prompt_key": data.prompt_key,
        "ground_truth_key": data.ground_truth_key,
        "reward_fn_key": data.reward_fn_key,
    }
    tasks = [path for path in (*data.train_files, *data.val_files) if _kind(path) == "prompts"]
    for key, column in named.items():
        if tasks and s.config.trainer.stage == "rl" and column not in (None, *_COLUMNS):
            why, fix = f"the rows of {tasks[0]} have no such column", did_you_mean(column, _COLUMNS)
            yield Finding(field=f"data.{key}", why=why, fix=fix)


# A: Python objects that a run was given.

_REWARD = "reward.custom_reward_function.path"
_TOOLS = "actor_rollout_ref.rollout.multi_turn.function_tool_path"


@rule("A11", "error")
def objects_are_there(s: RuleContext) -> Iterator[Finding]:
    """Objects that have no source are given again to the process that resumes their run."""
    for field, path, argument in _object_files(s):
        name = absent_object(path)
        if name is not None and not is_loaded(path):
            why = f"`{name}` was given as a Python object that has no source of its own"
            fix = f"resume it with luyen.train(resume=RUN, {argument}={name}), or move it to a file"
            yield Finding(field=field, why=why, fix=fix)


@rule("A12", "error")
def objects_stay_in_their_process(s: RuleContext) -> Iterator[Finding]:
    """A reward that exists in this process only is called by this process."""
    path = s.config.reward.custom_reward_function.path
    name = absent_object(path) if path is not None else None
    if name is not None and s.config.reward.reward_manager.name == "prime":
        why = f"it calls `{name}` in other processes, and that object exists in this one only"
        fix = "set it to naive or batch, or move the function with all that it uses to a file"
        yield Finding(field="reward.reward_manager.name", why=why, fix=fix)


def _object_files(s: RuleContext) -> Iterator[tuple[str, str, str]]:
    """Key, file and argument of `luyen.train` of what may have been an object."""
    reward = s.config.reward.custom_reward_function.path
    tools = s.config.actor_rollout_ref.rollout.multi_turn.function_tool_path
    if reward is not None:
        yield _REWARD, reward, "reward"
    if tools is not None:
        yield _TOOLS, tools, "tools"
