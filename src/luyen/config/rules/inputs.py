"""D: rows and rewards: files that must be there before anything starts."""

import ast
from collections.abc import Iterator

from luyen.base.paths import exists, expanded
from luyen.base.suggest import did_you_mean
from luyen.config.plugins import SAMPLER_NEEDS, SOURCE_PACKAGES, SOURCES
from luyen.config.rules.rule import Finding, Situation, rule


@rule("D01", "error")
def training_rows_are_named(s: Situation) -> Iterator[Finding]:
    """`data.train_files` names what to train on."""
    if not s.config.data.train_files:
        yield Finding(
            field="data.train_files",
            why="required, and not set",
            fix="give parquet, JSON or JSONL files, or a task source such as arithmetic://",
        )


@rule("D02", "error")
def data_files_exist(s: Situation) -> Iterator[Finding]:
    """Data files that are named are there, and task sources are known."""
    data = s.config.data
    for field, paths in (("train_files", data.train_files), ("val_files", data.val_files)):
        for path in paths:
            scheme, is_source, _ = path.partition("://")
            if is_source and scheme not in SOURCES:
                fix = did_you_mean(scheme, SOURCES)
                yield Finding(field=f"data.{field}", why=f"no task source `{scheme}://`", fix=fix)
            elif not is_source and not exists(path):
                why = f"{path}: no such file on this machine"
                yield Finding(field=f"data.{field}", why=why, fix="mend the path")


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


def _defined(block: str, prefix: str, path: str, name: str) -> Iterator[Finding]:
    """Findings unless the file exists, is Python, and defines the name at its top."""
    head = f"{block}.{prefix}_" if prefix else f"{block}."
    try:
        tree = ast.parse(expanded(path).read_text(encoding="utf-8"))
    except SyntaxError as error:
        why = f"not valid Python: line {error.lineno}: {error.msg}"
        yield Finding(field=f"{head}path", why=why, fix="mend the file")
        return
    except (OSError, ValueError) as error:
        yield Finding(field=f"{head}path", why=f"cannot be read: {error}", fix="mend the path")
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
    """`data.sampler.name` is a registered name, and its required arguments are given."""
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
