"""Rows of a configuration as training sees them: `python -m luyen.studio.actions.data_preview`.

It runs as a process of its own, since tokenizers and tools are loaded; the answer is JSON on
standard output. Only the first rows are read, whatever the size of the files.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from luyen.base.errors import UserError
from luyen.base.process_setup import prepare_process
from luyen.base.records import Prompt
from luyen.base.secrets import masked
from luyen.config.schema.run import RunConfig
from luyen.data.formats.detect import Kind
from luyen.data.formats.read import PromptOptions, RowReader, open_rows
from luyen.data.formats.records import AnyRow
from luyen.data.formats.render import in_tokens
from luyen.data.offline import as_conversation, longest, teaches_nothing
from luyen.data.render import Renderer
from luyen.data.rows import frame_of
from luyen.pipeline.policy_loading import read_config
from luyen.rollout.build import build_tool_environment
from luyen.train.builders.setup import import_plugins, load_run_tokenizer
from luyen.train.offline.start import STAGES

Split: TypeAlias = Literal["train", "validation"]
_MOST_TEXT = 20_000
_MOST_PROBLEMS = 20


def preview(config: RunConfig, split: Split, limit: int) -> dict[str, Any]:
    """The first rows of a split with their tokens, and what keeps a row from being used.

    A UserError where a file cannot be read or holds rows of another kind.
    """
    import_plugins(config.trainer.plugins)
    renderer = Renderer(
        load_run_tokenizer(config), template_kwargs=config.data.apply_chat_template_kwargs
    )
    data = config.data
    files = data.train_files if split == "train" else data.val_files
    tools = offered_tools(config)
    rows, problems = list[dict[str, Any]](), list[dict[str, Any]]()
    for address in files:
        reading = _reading(config, address)
        for at, row in islice(_with_tools(reading, tools), limit - len(rows)):
            rows.append({"at": str(at), **_laid_out(row, config, renderer)})
        problems += [
            {"at": str(one.at), "message": one.error.why}
            for one in reading.problems[:_MOST_PROBLEMS]
        ]
        if len(rows) >= limit:
            break
    return {"rows": rows, "problems": problems}


def offered_tools(config: RunConfig) -> Any:
    """What the tools of a run are for a prompt; None where it has none."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    if config.trainer.stage != "rl" or not multi_turn.enable:
        return None
    return build_tool_environment(multi_turn).offered


def _reading(config: RunConfig, address: str) -> RowReader[AnyRow]:
    data, is_online = config.data, config.trainer.stage == "rl"
    options = PromptOptions(frame=frame_of(data))
    if is_online:
        options = PromptOptions(
            frame=frame_of(data),
            prompt_key=data.prompt_key,
            ground_truth_key=data.ground_truth_key,
        )
    reading = open_rows(
        address, string_prompts=data.string_prompts, on_problem="skip", prompts=options
    )
    kinds = (Kind.PROMPTS,) if is_online else STAGES[config.trainer.stage].kinds(config)
    if reading.format.kind not in kinds:
        why = f"its rows are of the kind `{reading.format.kind}`, not {' or '.join(kinds)}"
        raise UserError("data.train_files", address, why, "see `luyen data inspect`")
    return reading


def _with_tools(reading: RowReader[AnyRow], tools: Any) -> Iterator[tuple[Any, AnyRow]]:
    for at, row in reading:
        if tools is not None and isinstance(row, Prompt):
            yield at, replace(row, tools=tools(row))
        else:
            yield at, row


def _laid_out(row: AnyRow, config: RunConfig, renderer: Renderer) -> dict[str, Any]:
    """The parts of a row and its problems; a row that the chat template refuses has no parts."""
    data = config.data
    try:
        if config.trainer.stage != "rl" and isinstance(row, Prompt):
            row = as_conversation(row)
        parts = in_tokens(row, renderer)
        if isinstance(row, Prompt):
            size, most = parts[0].length, data.max_prompt_length
            notes = [f"{size} tokens, and data.max_prompt_length is {most}"] * (size > most)
        else:
            size, most = longest(row, renderer), data.max_prompt_length + data.max_response_length
            notes = [f"{size} tokens, more than the {most} of both lengths"] * (size > most)
            notes += ["nothing in it is learned"] * teaches_nothing(row, renderer)
    except UserError as error:
        return {"parts": [], "problems": [f"{error.why}. {error.fix}"]}
    shown = [asdict(part) for part in parts]
    for part in shown:
        for stretch in part["stretches"]:
            stretch["text"] = stretch["text"][:_MOST_TEXT]
    return {"parts": shown, "problems": notes}


def main(file: str, split: str, limit: str) -> int:
    """Print the preview of a configuration file, or the error that forbids it."""
    # What libraries print must not come between the bytes of the answer.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    prepare_process()
    try:
        page = preview(read_config([Path(file)], ()), "train" if split == "train" else "validation",
                       int(limit))  # fmt: skip
    except UserError as error:
        said = {"field": error.field, "message": masked(error.why), "fix": error.fix}
        page = {"rows": [], "problems": [], "error": said}
    json.dump(page, out, default=str)
    out.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
