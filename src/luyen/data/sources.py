"""Where rows come from (files, Hugging Face, reasoning-gym, tasks), and their fingerprint."""

import dataclasses
import hashlib
import importlib
import json
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, final

from luyen.base.errors import UserError, did_you_mean
from luyen.base.input_files import expanded
from luyen.base.records import Prompt, make_prompt
from luyen.config.dataset_facts import row_files
from luyen.config.task_urls import FIELD, TaskUrl, parse_task_url, read_gym, read_hub
from luyen.data.arithmetic_tasks import arithmetic_rows
from luyen.data.messages import MarkerHit
from luyen.data.raw_values import canonical, is_list, is_object, raw_json, without_none
from luyen.data.row_store import Origins, RowWriter, changed, stored_like
from luyen.data.rows import Columns, RowAt, check_plain, is_plain_text, read_row
from luyen.data.tool_tasks import tool_rows

# Readers of parquet, JSON and JSONL files: raw rows with their numbers.

Numbered: TypeAlias = Iterator[tuple[int, Any]]
"""Row numbers, from 1, with raw rows."""
_BATCH = 1024
"""Rows of a parquet file that are unpacked at a time."""
MOST_LINE = 2**28
"""Characters of the longest row of a JSONL file."""
MOST_JSON = 2**31
"""Bytes of the largest list in JSON."""


def read_file(path: Path) -> Numbered:
    """The rows of a file, by its ending; the number of a JSONL row is its line.

    The file is one that `row_files` found. A UserError names what in it is no row.
    """
    try:
        yield from READERS[path.suffix.lower()](path)
    except (OSError, UnicodeDecodeError) as error:
        why = f"cannot be read: {str(error).strip().splitlines()[0]}"
        raise UserError(FIELD, str(path), why, "check the file and its permissions") from error


def _read_parquet(path: Path) -> Numbered:
    arrow: Any = importlib.import_module("pyarrow")  # untyped, and slow to load
    parquet: Any = importlib.import_module("pyarrow.parquet")
    number = 0
    try:
        file = parquet.ParquetFile(path)
        refuse_repeats(file.schema_arrow.names, path)
        for batch in file.iter_batches(batch_size=_BATCH):
            for row in batch.to_pylist():
                number += 1
                yield number, without_none(row)
    except (ValueError, arrow.ArrowException, RecursionError, MemoryError) as error:
        after = f" after row {number}" if number else ""
        why = f"not a parquet file{after}: {str(error).splitlines()[0] if str(error) else error!r}"
        raise UserError(
            FIELD, str(path), why, "repair the file, or correct its extension"
        ) from error


def refuse_repeats(columns: Sequence[str], path: Path) -> None:
    """A UserError where two columns have one name: one of them would be lost."""
    twice = next((name for name, times in Counter(columns).items() if times > 1), None)
    if twice is not None:
        why = f"the column `{twice}` is there twice"
        raise UserError(FIELD, str(path), why, "drop or rename one of them")


def _read_json(path: Path) -> Numbered:
    if path.stat().st_size > MOST_JSON:
        why = f"a list in JSON is read as a whole, and this one has more than {MOST_JSON} bytes"
        raise UserError(FIELD, str(path), why, "write one object a line, as .jsonl")
    try:
        rows = raw_json(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        fix = "correct the file; one object per line is a .jsonl file"
        raise UserError(FIELD, str(path), f"not valid JSON: {error}", fix) from error
    if not is_list(rows):
        why = "a JSON file of rows holds one list"
        raise UserError(FIELD, str(path), why, "write [{...}, {...}]")
    yield from enumerate(rows, 1)


def _read_jsonl(path: Path) -> Numbered:
    with path.open(encoding="utf-8-sig") as lines:
        # Not by iteration: a line without an end would be read to the end of the file.
        for number, line in enumerate(iter(lambda: lines.readline(MOST_LINE + 1), ""), 1):
            if len(line) > MOST_LINE:
                why = f"line {number} has more than {MOST_LINE} characters"
                raise UserError(FIELD, str(path), why, "correct or remove the line")
            if not line.strip():
                continue
            try:
                row = raw_json(line)
            except ValueError as error:
                why = f"line {number} is not valid JSON: {error}"
                raise UserError(FIELD, str(path), why, "correct or remove the line") from error
            yield number, row


READERS: dict[str, Callable[[Path], Numbered]] = {
    ".parquet": _read_parquet,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
}
"""Ending of a file's name -> how it is read."""


# Hugging Face datasets. No other file imports the `datasets` package.


def hub_rows(url: TaskUrl) -> Iterator[dict[str, Any]]:
    """Rows of `hf://org/name?split=train`, fetched or taken from the local cache, one by one."""
    said = read_hub(url)
    datasets = _datasets_package(url.text)
    try:
        found = datasets.load_dataset(
            url.name,
            said.get("config"),
            split=said.get("split", "train"),
            revision=said.get("revision"),
        )
    except (OSError, ValueError) as error:
        why = f"cannot be loaded: {str(error).splitlines()[0]}"
        raise url.error(why, "correct the name or the split, or check the connection") from error
    return (without_none(row) for row in found)


def saved_rows(directory: Path) -> Iterator[dict[str, Any]]:
    """Rows of a directory that `save_to_disk` wrote, one by one."""
    datasets = _datasets_package(str(directory))
    try:
        for row in datasets.load_from_disk(str(directory)):
            yield without_none(row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"cannot be read: {type(error).__name__}: {error}"
        raise UserError(FIELD, str(directory), why, "save the dataset again") from error


def _datasets_package(address: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        fix = 'install it: pip install "luyen[datasets]"'
        raise UserError(FIELD, address, "the datasets package is not installed", fix) from error


# `reasoning_gym://TASK?...`: the tasks of the reasoning-gym package, with what its verifier
# needs.
#
# A row's `data_source` is `reasoning_gym/TASK`, and its `extra_info` carries, under
# `reasoning_gym`, the name of the dataset and the entry: what
# `reasoning_gym.get_score_answer_fn` asks for.


def reasoning_gym_rows(url: TaskUrl) -> list[dict[str, Any]]:
    """Rows of one task; every other key of the address goes to the task's own configuration."""
    gym, factory = _reasoning_gym_package(url)
    if url.name not in factory.DATASETS:
        raise url.error(f"no task `{url.name}`", did_you_mean(url.name, factory.DATASETS))
    known = [field.name for field in dataclasses.fields(factory.DATASETS[url.name][1])]
    url.refuse_unknown(known)
    size, seed = read_gym(url)
    own = {k: _literal(v) for k, v in url.query.items() if k not in ("size", "seed")}
    before = random.getstate()
    random.seed(seed)  # a few tasks also sample from the global generator
    try:
        entries = list(gym.create_dataset(url.name, size=size, seed=seed, **own))
    except (AssertionError, ValueError, TypeError) as error:
        why = f"the task refuses its settings: {error}"
        raise url.error(why, f"change {', '.join(own) or 'size'}") from error
    finally:
        random.setstate(before)
    return [_row(url.name, i, entry) for i, entry in enumerate(entries)]


def _reasoning_gym_package(url: TaskUrl) -> tuple[Any, Any]:
    try:
        return importlib.import_module("reasoning_gym"), importlib.import_module(
            "reasoning_gym.factory"
        )
    except ImportError as error:
        fix = 'install it: pip install "luyen[tasks]"'
        raise UserError(FIELD, url.text, "reasoning-gym is not installed", fix) from error


def _literal(text: str) -> Any:
    """A number, a boolean, a list, or the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # also a number of too many digits
        return text


def _row(task: str, index: int, entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "data_source": f"reasoning_gym/{task}",
        "prompt": [{"role": "user", "content": str(entry["question"])}],
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {"index": index, "reasoning_gym": {"dataset": task, "entry": entry}},
    }


SCHEMES: dict[str, Callable[[TaskUrl], Iterable[dict[str, Any]]]] = {
    "arithmetic": arithmetic_rows,
    "tools": tool_rows,
    "reasoning_gym": reasoning_gym_rows,
    "hf": hub_rows,
}
"""Scheme of an address -> the function that gives its rows."""


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
    """Prompts, the origin of each, and counts of the rows that were dropped.

    Example:
        >>> dataset = load_dataset(["arithmetic://sum?size=3"])
        >>> len(dataset.prompts), dataset.origins[0], dict(dataset.counts)
        (3, 'arithmetic://sum?size=3 row 1', {'read': 3})
    """

    prompts: Sequence[Prompt]
    """The prompts, in the order of the files: a tuple, or beyond some size on disk."""
    origins: Sequence[str]
    """File and row of each prompt."""
    sources: tuple[RowSource, ...]
    """Files and addresses, in the order given."""
    fingerprint: str
    """Hash over the fingerprints of the sources, in order."""
    counts: Mapping[str, int]
    """Rows read, and rows that each filter dropped or changed."""
    markers: tuple[MarkerHit, ...] = ()
    """Template markers found inside rows."""
    files: tuple[int, ...] = ()
    """Of each prompt, the place of its file or address in `sources`."""

    def __post_init__(self) -> None:
        assert len(self.prompts) == len(self.origins), "a prompt without an origin"
        assert len(self.prompts) == len(self.files), "a prompt without a file"


def load_dataset(
    addresses: Sequence[str],
    columns: Columns | None = None,
    *,
    most: int = -1,
    most_of: Sequence[int] = (),
    field: str = FIELD,
) -> Dataset:
    """Every row of the files and addresses as a prompt, or at most the first `most`.

    `most_of` says for each address how many of its first rows count; -1: all. `field` is the key
    that names them: errors name it.
    """
    with about(field):
        return _load(addresses, columns or Columns(), most, most_of)


def rows_wanted(most: int, most_of: Sequence[int], file: int, *, have: int) -> float:
    """Rows that may still come from the address number `file`, where `have` are there already.

    Example:
        >>> rows_wanted(10, (4, -1), 0, have=0), rows_wanted(10, (4, -1), 1, have=4)
        (4, 6)
    """
    left = most - have if most >= 0 else float("inf")
    own = most_of[file] if file < len(most_of) and most_of[file] >= 0 else float("inf")
    return min(left, own)


@contextmanager
def about(field: str, unnamed: str = FIELD) -> Generator[None]:
    """Errors inside about an address, which call it `unnamed`, name the key that it stands at."""
    try:
        yield
    except UserError as error:
        if error.field != unnamed:
            raise
        raise UserError(field, error.value, error.why, error.fix) from error


def _load(addresses: Sequence[str], chosen: Columns, most: int, most_of: Sequence[int]) -> Dataset:
    prompts, origins = RowWriter[Prompt](), Origins()
    files: list[int] = []
    sources: list[RowSource] = []
    wrapped = 0
    for place, address in enumerate(addresses):
        wanted = rows_wanted(most, most_of, place, have=len(prompts))
        digest, count = hashlib.blake2b(digest_size=16), 0
        rows = raw_rows(address)
        for file, number, row in rows:
            count += 1
            at = RowAt(file=file, number=number)
            with _a_torn_file_first(rows):
                check_plain(row if is_object(row) else {"row": row}, at)
                text = _canonical_text(row).encode()
                prompt = read_row(row, at, chosen) if count <= wanted else None
            digest.update(text)
            if prompt is None:
                continue
            prompts.append(prompt, num_bytes=len(text))
            files.append(place)
            origins.append(file, number)
            wrapped += is_plain_text(row, chosen)
        if not count:
            fix = "add rows, or remove it from the list of files"
            raise UserError(FIELD, address, "there are no rows in it", fix)
        sources.append(RowSource(address=address, rows=count, fingerprint=digest.hexdigest()))
    together = "".join(source.fingerprint for source in sources)
    counts = {"read": sum(source.rows for source in sources)}
    stored = prompts.rows()
    return Dataset(
        prompts=stored,
        origins=stored_like(origins, stored),
        sources=tuple(sources),
        fingerprint=hashlib.blake2b(together.encode(), digest_size=16).hexdigest(),
        counts=counts | ({"plain text made a user message": wrapped} if wrapped else {}),
        files=tuple(files),
    )


@contextmanager
def _a_torn_file_first(rest: Iterator[Any]) -> Generator[None]:
    """An error about a row is raised after the rest was read, which may show a torn file."""
    try:
        yield
    except UserError:
        for _ in rest:
            pass
        raise


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


# Tool schemas enter prompts in one place, so that training and inference render the same ones.

Offered: TypeAlias = Callable[[Prompt], tuple[Mapping[str, Any], ...]]
"""Schemas of the tools that a prompt's conversations may call."""


def with_tools(dataset: Dataset, offered: Offered) -> Dataset:
    """The prompts with the schemas of the run's own tools; what a row lists only chooses by name.

    A UserError names the row that asks for a tool the run does not have.
    """

    def with_schemas(place: int, prompt: Prompt) -> Prompt:
        try:
            tools = offered(prompt)
        except UserError as error:
            field = f"{dataset.origins[place]}: {error.field}"
            raise UserError(field, error.value, error.why, error.fix) from None
        return make_prompt(
            prompt.messages,
            tools=tools,
            data_source=prompt.data_source,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
        )

    return replace(dataset, prompts=changed(dataset.prompts, with_schemas))
