"""Where rows come from, and a fingerprint of what they say."""

import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.paths import expanded
from luyen.base.records import Prompt
from luyen.base.suggest import did_you_mean
from luyen.config.row_files import row_files
from luyen.config.task_url import FIELD, TaskUrl, parse_task_url
from luyen.data.arithmetic import arithmetic_rows
from luyen.data.files import Numbered, read_file
from luyen.data.hub import hub_rows, saved_rows
from luyen.data.markers import Marked
from luyen.data.reasoning_gym import reasoning_gym_rows
from luyen.data.rows import Columns, RowAt, check_plain, is_plain_text, read_row
from luyen.data.shapes import canonical, is_object, without_none
from luyen.data.tool_tasks import tool_rows

SCHEMES: dict[str, Callable[[TaskUrl], list[dict[str, Any]]]] = {
    "arithmetic": arithmetic_rows,
    "tools": tool_rows,
    "reasoning_gym": reasoning_gym_rows,
    "hf": hub_rows,
}
"""What stands before `://` -> who makes the rows."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """One file or address, as it was read.

    Example:
        >>> RowSource(address="a.jsonl", rows=2, fingerprint="ab").rows
        2
    """

    address: str
    """As the configuration names it."""
    rows: int
    """Rows in it."""
    fingerprint: str
    """Hash of its rows: equal for equal rows, whatever the file format."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Prompts, where each came from, and what happened to the others.

    Example:
        >>> dataset = load_dataset(["arithmetic://sum?size=3"])
        >>> len(dataset.prompts), dataset.origins[0], dict(dataset.counts)
        (3, 'arithmetic://sum?size=3 row 1', {'read': 3})
    """

    prompts: tuple[Prompt, ...]
    """What can be drawn."""
    origins: tuple[str, ...]
    """File and row of each prompt."""
    sources: tuple[RowSource, ...]
    """Files and addresses, in the order given."""
    fingerprint: str
    """Hash over the fingerprints of the sources, in order."""
    counts: Mapping[str, int]
    """Rows read, and rows that each filter dropped or changed."""
    markers: tuple[Marked, ...] = ()
    """Template markers found inside rows."""

    def __post_init__(self) -> None:
        assert len(self.prompts) == len(self.origins), "a prompt without an origin"


def load_dataset(
    addresses: Sequence[str],
    columns: Columns | None = None,
    *,
    most: int = -1,
    field: str = FIELD,
) -> Dataset:
    """Every row of the files and addresses as a prompt, or at most the first so many.

    `field` is the key that names them: errors name it.
    """
    with about(field):
        return _load(addresses, columns or Columns(), most)


@contextmanager
def about(field: str, unnamed: str = FIELD) -> Generator[None]:
    """Errors inside about an address, which call it `unnamed`, name the key that it stands at."""
    try:
        yield
    except UserError as error:
        if error.field != unnamed:
            raise
        raise UserError(field, error.value, error.why, error.fix) from error


def _load(addresses: Sequence[str], chosen: Columns, most: int) -> Dataset:
    prompts: list[Prompt] = []
    origins: list[str] = []
    sources: list[RowSource] = []
    wrapped = 0
    for address in addresses:
        digest, count = hashlib.blake2b(digest_size=16), 0
        for file, number, row in list(raw_rows(address)):  # a torn file first
            count += 1
            at = RowAt(file=file, number=number)
            check_plain(row if is_object(row) else {"row": row}, at)
            digest.update(_canonical_text(row).encode())
            if most >= 0 and len(prompts) >= most:
                continue
            prompts.append(read_row(row, at, chosen))
            origins.append(str(at))
            wrapped += is_plain_text(row, chosen)
        if not count:
            raise UserError(FIELD, address, "there are no rows in it", "mend it, or drop it")
        sources.append(RowSource(address=address, rows=count, fingerprint=digest.hexdigest()))
    together = "".join(source.fingerprint for source in sources)
    counts = {"read": sum(source.rows for source in sources)}
    return Dataset(
        prompts=tuple(prompts),
        origins=tuple(origins),
        sources=tuple(sources),
        fingerprint=hashlib.blake2b(together.encode(), digest_size=16).hexdigest(),
        counts=counts | ({"plain text made a user message": wrapped} if wrapped else {}),
    )


def raw_rows(address: str) -> Iterator[tuple[str, int, Any]]:
    """(file, number, raw row) of everything behind an address, one after the other."""
    if "://" in address:
        url = parse_task_url(address)
        if url.scheme not in SCHEMES:
            why = f"no task source `{url.scheme}://`"
            raise UserError(FIELD, address, why, did_you_mean(url.scheme, SCHEMES))
        yield from _with_file(address, enumerate(SCHEMES[url.scheme](url), 1))
        return
    for file in row_files(address):
        name = address if file == expanded(address) else str(file)
        rows = enumerate(saved_rows(file), 1) if file.is_dir() else read_file(file)
        yield from _with_file(name, rows)


def _with_file(file: str, rows: "Numbered | enumerate[Any]") -> Iterator[tuple[str, int, Any]]:
    return ((file, number, row) for number, row in rows)


def _canonical_text(row: Any) -> str:
    return json.dumps(canonical(without_none(row)), sort_keys=True, ensure_ascii=False)
