"""What is wrong with the first row of a file, before anything is loaded: for `luyen check`."""

from luyen.base.errors import UserError
from luyen.config.dataset_facts import row_files
from luyen.config.schema.run import RunConfig
from luyen.data.formats.read import PromptOptions, open_rows
from luyen.data.rows import RowAt, columns_of, frame_of, read_row
from luyen.data.sources import raw_rows

_WHOLE = (".json",)
"""Endings of files that are read whole or not at all,"""
_MOST_BYTES = 16 * 2**20
"""and how long they may be to be looked into."""


def first_row_error(config: RunConfig, address: str) -> UserError | None:
    """Why training would refuse the first row of a file; None where it would not, or none is read.

    Read are files of this machine. A file that is not there is an error of its own.

    Example:
        >>> first_row_error(RunConfig(), "arithmetic://sum") is None
        True
    """
    if "://" in address or not _is_read(address, is_online=config.trainer.stage == "rl"):
        return None
    data = config.data
    try:
        if config.trainer.stage == "rl":
            file, number, row = next(iter(raw_rows(address)))
            read_row(row, RowAt(file=file, number=number), columns_of(data))
        else:
            options = PromptOptions(frame=frame_of(data))
            next(iter(open_rows(address, string_prompts=data.string_prompts, prompts=options)))
    except UserError as error:
        return error
    except StopIteration:
        return UserError("FILE", address, "there are no rows in it", "add rows")
    return None


def _is_read(address: str, *, is_online: bool) -> bool:
    try:
        first = row_files(address, tables=not is_online)[0]
    except UserError:
        return False
    is_whole = first.suffix.lower() in _WHOLE
    return not first.is_dir() and (not is_whole or first.stat().st_size <= _MOST_BYTES)
