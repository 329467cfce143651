"""D: what is known of rows before they are read."""

from collections.abc import Iterator

from luyen.base.errors import UserError
from luyen.base.suggest import did_you_mean
from luyen.config.plugins import SOURCES
from luyen.config.row_kinds import QUERIES, kind_of_task, kinds_learned
from luyen.config.rules.rule import Finding, Situation, rule

_COLUMNS = ("data_source", "prompt", "reward_model", "extra_info")
"""What the questions of a task source have."""
_OF_RENDERING = (
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
    *("documents", "messages", "padding", "return_dict", "return_tensors", "tokenize", "tools"),
)
"""Names that the renderer, or the library below it, gives to a template."""


@rule("D17", "error")
def tasks_suit_the_stage(s: Situation) -> Iterator[Finding]:
    """Rows of task sources are of a kind that the stage learns from, and have what it asks for."""
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


def _absent_margins(s: Situation, path: str) -> Iterator[Finding]:
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
def rows_are_kept(s: Situation) -> Iterator[Finding]:
    """Of the rows that are read, some are kept."""
    data = s.config.data
    kept = {"train_max_samples": data.train_max_samples, "val_max_samples": data.val_max_samples}
    for name, most in kept.items():
        if most == 0:
            why, fix = "no row would be left", "set it to -1 for all rows, or to 1 or more"
            yield Finding(field=f"data.{name}", why=why, fix=fix)


@rule("D15", "error")
def template_arguments_are_free(s: Situation) -> Iterator[Finding]:
    """Arguments of the chat template are not those that every rendering sets itself."""
    for name in s.config.data.apply_chat_template_kwargs:
        if name in _OF_RENDERING:
            why = f"`{name}` is set by the row and by what is rendered of it"
            field = "data.apply_chat_template_kwargs"
            yield Finding(field=field, why=why, fix=f"drop {name}")


@rule("D16", "error")
def columns_of_tasks_are_there(s: Situation) -> Iterator[Finding]:
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
