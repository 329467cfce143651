"""Applies the rules of the Trainer to a file, and reads the names of its rows."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from luyen.base.input_files import exists
from luyen.config.dataset_facts import ENDINGS, TABLE
from luyen.config.fields import all_fields
from luyen.config.loader.aliases import FOREIGN
from luyen.config.migrate.common import always, choose, named, never, tried
from luyen.config.migrate.method_keys import design_defaults, rules_of, stage_of
from luyen.config.migrate.report import Entry, Outcome, Rule, SourceConfig, implied, keep, missing
from luyen.config.migrate.trainer_keys import RULES, is_online, worth_telling

_TRAIN, _VAL = "data.train_files", "data.val_files"


def entries(source: SourceConfig, own: Mapping[str, Rule]) -> list[Entry]:
    """What becomes of every key; then the stage and the tool's defaults that are not ours.

    Rules of the tool come first, then those of the method, then those of the Trainer.
    """
    rules = {**DATA_RULES, **RULES, **rules_of(source.method), **own}
    found: list[Entry] = []
    for key, value in source.values.items():
        name = source.written.get(key, key)
        found.append(Entry(source=name, value=value, outcome=_outcome(key, value, source, rules)))
    taken = {key for entry in found for key in entry.outcome.keys}
    more = [] if "trainer.stage" in taken else [_stage(source)]
    more += [
        Entry(source=key, value=value, outcome=outcome, is_default=True)
        for key, value in source.defaults.items()
        if not source.has(key) and value is not None
        for outcome in [_default(key, value, source, rules, taken)]
        if outcome is not None
    ]
    more += _devices(source, taken) + design_defaults(source)
    return [*found, *more]


def _outcome(key: str, value: Any, source: SourceConfig, rules: Mapping[str, Rule]) -> Outcome:
    rule = rules.get(key) or rules.get(_pattern(key))
    if value is None and key not in ("max_length", "max_prompt_length"):
        return implied("not set")
    if rule is not None:
        return tried(rule, value, source)
    near = FOREIGN.get(key.rpartition(".")[2])
    if near is not None:
        return missing(f"nearest here: {near}")
    return missing("Luyen has no such key")


def _pattern(key: str) -> str:
    """A key with the numbers of its entries taken out, and below a mixture without its name."""
    plain = re.sub(r"\[\d+\]", "[]", key)
    for block in ("dataset_mixer", "dataset_kwargs"):
        plain = f"{block}.*" if plain.startswith(f"{block}.") else plain
    return plain


def _default(
    key: str, value: Any, source: SourceConfig, rules: Mapping[str, Rule], taken: set[str]
) -> Outcome | None:
    """The keys that a tool's default sets, where Luyen's own value is another."""
    outcome = _outcome(key, value, source, rules)
    ours = {path: info.default for path, info in all_fields().items() if info.derived is None}
    keys = {k: v for k, v in outcome.keys.items() if k not in taken}
    keys = worth_telling(keys, ours)
    return Outcome(keys=keys, note=outcome.note) if keys else None


def _stage(source: SourceConfig) -> Entry:
    keys = stage_of(source)
    return Entry(source=f"{source.method}", value=source.tool, outcome=keep(keys), is_default=True)


def _devices(source: SourceConfig, taken: set[str]) -> list[Entry]:
    """Devices that sizes were multiplied with."""
    key = "trainer.n_gpus_per_node"
    if source.devices == 1 or key in taken or source.has("num_processes"):
        return []
    outcome = keep({key: source.devices})
    return [Entry(source="--devices", value=source.devices, outcome=outcome, is_default=True)]


# Rows.


def address(
    path: str, source: SourceConfig, *, split: str = "train", config: str | None = None
) -> str:
    """A file as the new configuration names it, or the address of a dataset on the hub."""
    is_file = path.lower().endswith((*ENDINGS, TABLE)) or path.startswith(("/", ".", "~"))
    if "://" in path:
        return path
    if is_file or exists(str(Path(source.folder) / path)):
        return source.place(path)
    query = f"?split={quote(split, safe='[]:%+')}" + (f"&config={config}" if config else "")
    return f"hf://{path}{query}"


def _name(value: Any, source: SourceConfig) -> Outcome:
    split = str(source.get("dataset_train_split") or "train")
    config = source.get("dataset_config") or source.get("dataset_configs")
    chosen = cast(list[Any], config)[0] if isinstance(config, list) else config
    keys = {_TRAIN: [address(str(value), source, split=split, config=chosen)]}
    test = source.get("dataset_test_split")
    if test and source.has("dataset_test_split"):
        keys[_VAL] = [address(str(value), source, split=str(test), config=chosen)]
    return keep(keys)


def _part(value: Any, source: SourceConfig) -> Outcome:
    """Splits and configurations of the dataset that another key names."""
    del value
    if source.has("dataset_name"):
        return _name(source.get("dataset_name"), source)
    if any(key.startswith("dataset_mixer.") for key in source.values):
        return _mixture(None, source)
    return implied("no dataset is named")


def _mixture(value: Any, source: SourceConfig) -> Outcome:
    names = {
        key.removeprefix("dataset_mixer."): share
        for key, share in source.values.items()
        if key.startswith("dataset_mixer.")
    }
    splits = [str(one) for one in source.get("dataset_splits") or ["train"]]
    keys: dict[str, Any] = {}
    for ours, word in ((_TRAIN, "train"), (_VAL, "test")):
        found = [one for one in splits if word in one]
        rows = [address(name, source, split=split) for name in names for split in found[:1]]
        if rows:
            keys[ours] = rows
    note = ""
    if value is not None and value != 1:
        note = f"all of its rows, not a share of {value}: give the file `max_samples`"
    return keep(keys, note)


def listed_rows(block: str, ours: str, *, path: str = "path", config: str = "name") -> Rule:
    """All entries of a list of datasets together name the files."""

    def rule(value: Any, source: SourceConfig) -> Outcome:
        del value
        count = 1 + max(
            int(key.removeprefix(f"{block}[").partition("]")[0])
            for key in source.values
            if key.startswith(f"{block}[")
        )
        names = [name for i in range(count) for name in files_of(f"{block}[{i}]", source)]
        return keep({ours: names})

    def files_of(entry: str, source: SourceConfig) -> list[str]:
        name, files = str(source.get(f"{entry}.{path}") or ""), source.get(f"{entry}.data_files")
        is_builder = name in ("json", "parquet", "csv") or source.has(f"{entry}.ds_type")
        if files is not None and is_builder:
            listed = cast(list[Any], files) if isinstance(files, list) else [files]
            return [address(str(file), source) for file in listed]
        split = str(source.get(f"{entry}.split") or "train")
        return [address(name, source, split=split, config=source.get(f"{entry}.{config}"))]

    return rule


def _validation(value: Any, source: SourceConfig) -> Outcome:
    listed = cast(list[Any], value) if isinstance(value, list) else [value]
    return keep({_VAL: [address(str(one), source) for one in listed]})


def _rows(value: Any, source: SourceConfig) -> Outcome:
    listed = cast(list[Any], value) if isinstance(value, list) else [value]
    return keep({_TRAIN: [address(str(one), source) for one in listed]})


def _template(value: Any, source: SourceConfig) -> Outcome:
    del source
    if "{" in str(value):
        return missing("put the template into a copy of the tokenizer: model.tokenizer_path")
    return implied("the tokenizer's own chat template is used: check that it is this one")


_SPLIT = "split rows off into a file, and name it in data.val_files"
_WEIGHT = "a share of its rows: give its entry of data.train_files `max_samples`"
DATA_RULES: dict[str, Rule] = {
    **{
        f"{block}[].{name}": listed_rows(block, _TRAIN, path=path, config=config)
        for block, path, config in (
            ("datasets", "path", "name"),
            ("dataset_mixture.datasets", "id", "config"),
        )
        for name in (path, config, "split", "data_files")
    },
    "dataset_mixture.datasets[].columns": always("columns are known by their names"),
    "dataset_mixture.datasets[].weight": choose(
        lambda value: value == 1, implied("all of its rows"), missing(_WEIGHT)
    ),
    "datasets[].columns": always("columns are known by their names"),
    "dataset_mixture.test_split_size": never(_SPLIT),
    "test_split_size": never(_SPLIT),
    "dataset_mixture.seed": named("data.seed"),
    "dataset_name": _name,
    "dataset_config": _part,
    "dataset_configs": _part,
    "dataset_train_split": _part,
    "dataset_test_split": _part,
    "dataset_splits": _part,
    "dataset_mixer.*": _mixture,
    "dataset_kwargs.*": always("rows are rendered by the chat template alone"),
    "dataset_path": _rows,
    "eval_dataset_path": _validation,
    "dataset_prompt_column": lambda value, source: (
        keep({"data.prompt_key": str(value)})
        if is_online(source)
        else missing("rows are read by the columns that a format has: `luyen data inspect FILE`")
    ),
    "system_prompt": named("data.system_prompt"),
    "chat_template": _template,
    "template": _template,
    "chat_template_kwargs": named("data.apply_chat_template_kwargs"),
    "ignore_bias_buffers": always("all weights are handled alike"),
}
