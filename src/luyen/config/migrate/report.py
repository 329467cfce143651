"""What became of each key of another tool: records, the table, and the YAML file with sources."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, final

import yaml

from luyen.base.errors import printable, shortened
from luyen.base.secrets import MASK, masked_tree
from luyen.config.fields import all_fields
from luyen.config.loader.tree import NestedDict, merged, nested

Column = Literal["carried", "renamed", "implied", "unavailable"]
TITLES: dict[Column, str] = {
    "carried": "Carried over",
    "renamed": "Renamed",
    "implied": "Implied by design",
    "unavailable": "Not available",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What becomes of one key: keys of ours, or the reason why there are none.

    Example:
        >>> keep({"trainer.seed": 1}).keys
        {'trainer.seed': 1}
    """

    keys: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keys of ours, and their values."""
    is_implied: bool = False
    """Without keys: whether Luyen always does what the key says, or the key changes no number."""
    note: str = ""
    """Why, or what to do."""
    is_open: bool = False
    """Whether the source does not say the value: it has to be written by hand."""


def keep(keys: Mapping[str, Any], note: str = "") -> Outcome:
    """The key is written under these names."""
    return Outcome(keys=keys, note=note)


def implied(why: str) -> Outcome:
    """Nothing is written: Luyen does so anyway, or no number depends on it."""
    return Outcome(is_implied=True, note=why)


def missing(why: str) -> Outcome:
    """Nothing is written, although it would matter; says what to do instead."""
    return Outcome(note=why)


def by_hand(why: str) -> Outcome:
    """Nothing is written, because the source does not say the value; says what to write."""
    return Outcome(note=why, is_open=True)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key of the other tool with what became of it.

    Example:
        >>> Entry(source="seed", value=1, outcome=keep({"trainer.seed": 1})).column
        'carried'
    """

    source: str
    """Name there."""
    value: Any
    """Value there; of a default, the value that the tool would have used."""
    outcome: Outcome
    """Keys of ours, or why there are none."""
    is_default: bool = False
    """Whether the tool's default is meant: the key was not written."""

    @property
    def column(self) -> Column:
        """The column of the table that it belongs to."""
        keys = self.outcome.keys
        if not keys:
            return "implied" if self.outcome.is_implied else "unavailable"
        last = self.source.rpartition(".")[2]
        same = [key for key in keys if key.rpartition(".")[2] == last]
        is_same = len(keys) == len(same) == 1 and keys[same[0]] == self.value
        return "carried" if is_same else "renamed"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """A configuration of another tool, flat, with what its rules have to know.

    Example:
        >>> rows = SourceConfig(tool="TRL", where="a.py", method="dpo", values={"beta": 0.2})
        >>> rows.get("beta"), rows.get("seed")
        (0.2, None)
    """

    tool: str
    """Name of the tool."""
    where: str
    """File or command that it was read from."""
    method: str
    """What is trained how: grpo, dpo, sft, ..."""
    values: Mapping[str, Any]
    """Dotted key -> value, in the order of the file; of flat tools under the names of TRL."""
    written: Mapping[str, str] = field(default_factory=dict[str, str])
    """Key of `values` -> name in the file, where it is another one."""
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Key -> value that the tool uses where nothing is written."""
    devices: int = 1
    """Devices that it ran on, where the tool's sizes are for one of them."""
    installed: Callable[[str], bool] = field(default=lambda _: False)
    """Whether a Python package is installed."""
    place: Callable[[str], str] = field(default=lambda path: path)
    """Path as the tool reads it -> as the file that is written names it."""
    folder: str = "."
    """Folder that relative paths of the tool start from."""

    def get(self, key: str) -> Any:
        """The value in force: written, or the tool's default."""
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def has(self, key: str) -> bool:
        """Whether the file gives it a value."""
        return self.values.get(key) is not None


Rule = Callable[[Any, SourceConfig], Outcome]
"""What becomes of a key with this value."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """A configuration of ours with the account of every key that it comes from.

    Example:
        >>> entry = Entry(source="seed", value=1, outcome=keep({"trainer.seed": 1}))
        >>> Migration(tool="TRL", where="a.yaml", entries=(entry,)).values
        {'trainer': {'seed': 1}}
    """

    tool: str
    """Name of the other tool."""
    where: str
    """File or command that was read."""
    entries: tuple[Entry, ...]
    """One for each key that was written, then defaults of the tool that are not ours."""

    @property
    def keys(self) -> dict[str, Any]:
        """Our keys; what is written wins over a default."""
        ordered = sorted(self.entries, key=lambda entry: not entry.is_default)
        return {key: value for entry in ordered for key, value in entry.outcome.keys.items()}

    @property
    def values(self) -> NestedDict:
        """The same, nested."""
        tree: NestedDict = {}
        for key, value in self.keys.items():
            tree = merged(tree, nested(key.split("."), value))
        return tree

    def without(self, key: str, *, note: str, is_implied: bool) -> "Migration":
        """The migration without one of our keys; its sources keep the reason."""
        changed = [_without(entry, key, note, is_implied) for entry in self.entries]
        return replace(self, entries=tuple(changed))

    def sources_of(self, key: str) -> list[Entry]:
        """Entries that give one of our keys its value."""
        found = [entry for entry in self.entries if key in entry.outcome.keys]
        written = [entry for entry in found if not entry.is_default]
        return written or found


def _without(entry: Entry, key: str, note: str, is_implied: bool) -> Entry:
    outcome = entry.outcome
    if key not in outcome.keys:
        return entry
    kept = {name: value for name, value in outcome.keys.items() if name != key}
    notes = "; ".join(part for part in (outcome.note, note) if part)
    lost = Outcome(keys=kept, is_implied=is_implied and not kept, note=notes)
    return replace(entry, outcome=lost)


# The file: our keys in the order of the schema, each with the key that it comes from.


def yaml_text(migration: Migration) -> str:
    """The file with a comment for each key, and at its end what is not in it."""
    lines = [f"# From {_plain(migration.where)} ({migration.tool}), by `luyen migrate`."]
    order = {path: number for number, path in enumerate(all_fields())}
    keys = sorted(migration.keys.items(), key=lambda item: order.get(item[0], len(order)))
    above: list[str] = []
    for key, value in keys:
        *blocks, name = key.split(".")
        common = 0
        while common < min(len(blocks), len(above)) and blocks[common] == above[common]:
            common += 1
        for depth in range(common, len(blocks)):
            lines += [""] if depth == 0 else []
            lines.append(f"{'  ' * depth}{blocks[depth]}:")
        above = blocks
        lines.append(f"{'  ' * len(blocks)}{name}: {_scalar(value)}  # {_origin(migration, key)}")
    lost = [entry for entry in migration.entries if entry.column == "unavailable"]
    if lost:
        lines += ["", "# Not available:"]
    lines += [f"# - {_plain(entry.source)}: {_plain(entry.outcome.note)}" for entry in lost]
    return "\n".join(lines) + "\n"


def _origin(migration: Migration, key: str) -> str:
    found = migration.sources_of(key)
    names = ", ".join(dict.fromkeys(entry.source for entry in found))
    default = all(entry.is_default for entry in found)
    return _plain(f"{migration.tool}'s own: {names}" if default else names)


def _scalar(value: Any) -> str:
    """A value on one line of YAML."""
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1e6:
        return f"{value:.1e}"
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    if "\n" in str(value) or "\\n" in str(value):
        return json.dumps(
            value, ensure_ascii=False, default=str
        )  # YAML would fold it over several lines
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.strip().removesuffix("...").strip()


def _plain(text: str) -> str:
    """Text that fits a comment: one line, nothing that a terminal would obey."""
    return printable(" ".join(text.split()))


# The table.

_WIDEST = 44


def table_lines(migration: Migration) -> Iterator[str]:
    """The table as text: a part for each column that has keys, then the defaults."""
    written = [entry for entry in migration.entries if not entry.is_default]
    counts = ", ".join(
        f"{sum(entry.column == column for entry in written)} {title.lower()}"
        for column, title in TITLES.items()
    )
    yield f"{migration.tool}: {len(written)} keys of {_plain(migration.where)}: {counts}"
    for column, title in TITLES.items():
        yield from _part(title, [entry for entry in written if entry.column == column])
    defaults = [entry for entry in migration.entries if entry.is_default]
    yield from _part(f"Defaults of {migration.tool} that are not Luyen's", defaults)


def _shown_keys(entry: Entry) -> dict[str, Any]:
    """What became of a key, without secrets: those of an address may have lost its form."""
    is_secret = masked_tree(entry.value, entry.source) != entry.value
    return {k: MASK if is_secret else masked_tree(v, k) for k, v in entry.outcome.keys.items()}


def _part(title: str, entries: Sequence[Entry]) -> Iterator[str]:
    if not entries:
        return
    yield ""
    yield title
    for entry in entries:
        value = printable(str(shortened(_scalar(masked_tree(entry.value, entry.source)))))
        head = f"  {printable(entry.source)} = {value}"
        keys = _shown_keys(entry)
        ours = ", ".join(f"{key}={_scalar(v)}" for key, v in keys.items())
        if entry.column == "carried":
            [key] = entry.outcome.keys
            ours = "" if key == entry.source else key
        note = _plain(entry.outcome.note)
        said = "; ".join(part for part in (printable(ours), note) if part)
        if not said:
            yield head
        elif len(head) <= _WIDEST:
            yield f"{head:{_WIDEST}s}  {said}"
        else:
            yield head
            yield f"{'':{_WIDEST}s}  {said}"


def migration_json(migration: Migration) -> dict[str, Any]:
    """The same as plain data."""
    entries = [
        {
            "key": entry.source,
            "value": masked_tree(entry.value, entry.source),
            "column": "default" if entry.is_default else entry.column,
            "keys": _shown_keys(entry),
            "note": entry.outcome.note,
        }
        for entry in migration.entries
    ]
    return {"tool": migration.tool, "source": migration.where, "entries": entries}


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted path -> value; entries of a list of mappings by number, as in `datasets[0].path`.

    Example:
        >>> flat({"a": {"b": 1}, "c": [{"d": 2}], "e": [3, 4], "f": {}})
        {'a.b': 1, 'c[0].d': 2, 'e': [3, 4], 'f': {}}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        listed = cast(list[Any], value) if isinstance(value, list) else []
        if isinstance(value, Mapping) and value:
            inner = flat(cast(Mapping[str, Any], value))
            found |= {f"{name}.{path}": one for path, one in inner.items()}
        elif listed and all(isinstance(one, Mapping) for one in listed):
            for number, one in enumerate(listed):
                found |= {f"{name}[{number}].{path}": v for path, v in flat(one).items()}
        else:
            found[name] = _read_again(value)
    return found


def _read_again(value: Any) -> Any:
    """A number that YAML 1.1 takes for text, such as 5e-5, as these tools read it."""
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    return float(value) if is_number else value
