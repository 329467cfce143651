"""LLaMA-Factory's `dataset_info.json`: columns and tags of the files in its folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from luyen.base.errors import UserError, did_you_mean
from luyen.base.input_files import read_text
from luyen.data.formats.cells import CALL
from luyen.data.formats.detect import FORMS, Format, Tags
from luyen.data.raw_values import is_object, parsed_json

NAME = "dataset_info.json"
_ENTRY = (
    *("file_name", "formatting", "ranking", "columns", "tags", "num_samples", "subset", "split"),
    *("folder", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"),
    *("load_from", "file_sha1"),
)
_COLUMNS = {
    "alpaca": {
        "prompt": "instruction",
        "query": "input",
        "response": "output",
        "history": "history",
        "system": "system",
    },
    "sharegpt": {"messages": "conversations", "system": "system"},
}
"""Key of `columns` -> our name for that column, which is also its default."""
_SHARED = {name: name for name in ("tools", "chosen", "rejected", "kto_tag")}
_MEDIA = ("images", "videos", "audios")
_SPEAKERS = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": CALL,
    "system_tag": "system",
}


def described(path: Path) -> Format | None:
    """The format that a `dataset_info.json` in the file's folder declares for it, or None."""
    info = path.parent / NAME
    if not info.is_file() or path.name == NAME:
        return None
    try:
        entries: Any = parsed_json(read_text(info))
    except (ValueError, OSError) as error:
        raise UserError(
            str(info), path.name, f"cannot be read: {error}", "write valid JSON"
        ) from error
    if not is_object(entries):
        raise UserError(str(info), path.name, "it holds one object", 'write {"name": {...}}')
    mine = {n: e for n, e in entries.items() if is_object(e) and e.get("file_name") == path.name}
    if not mine:
        return None
    found = [_format(entry, f"{info}: {name}") for name, entry in mine.items()]
    if any(_meaning(other) != _meaning(found[0]) for other in found[1:]):
        why = f"it describes the file more than once: {', '.join(mine)}"
        raise UserError(str(info), path.name, why, "keep one of them")
    return found[0]


def _meaning(format: Format) -> tuple[Any, ...]:
    return format.form.name, dict(format.columns), format.tags


def _format(entry: Mapping[str, Any], where: str) -> Format:
    _refuse_unknown(entry, _ENTRY, where)
    manner = _manner(entry, where)
    columns: Mapping[str, str] = _object(entry, "columns", where)
    known = _COLUMNS[manner] | _SHARED
    _refuse_unknown(columns, (*known, *_MEDIA), f"{where}.columns")
    ours = {known[key]: value for key, value in columns.items() if key in known}
    is_ranked = bool(entry.get("ranking", False))
    is_labelled = "kto_tag" in ours
    if is_ranked and is_labelled:
        why = "rows are either ranked in pairs or judged one by one"
        raise UserError(f"{where}.columns.kto_tag", ours["kto_tag"], why, "drop it, or `ranking`")
    ending = "-preference" if is_ranked else "-labelled" if is_labelled else ""
    left = [f"{NAME}: `num_samples` is not applied"] if "num_samples" in entry else []
    return Format(
        form=FORMS[f"{manner}{ending}"],
        why=f"{where} says {entry.get('formatting', 'alpaca')}{', ranking' if is_ranked else ''}",
        columns=ours,
        tags=_tags(_object(entry, "tags", where), where) if manner == "sharegpt" else Tags(),
        notes=tuple(left),
    )


def _manner(entry: Mapping[str, Any], where: str) -> Literal["alpaca", "sharegpt"]:
    said = entry.get("formatting", "alpaca")
    if said == "alpaca":
        return "alpaca"
    if said in ("sharegpt", "openai"):
        return "sharegpt"
    fix = did_you_mean(str(said), ("alpaca", "sharegpt", "openai"))
    raise UserError(f"{where}.formatting", said, "no such formatting", fix)


def _tags(tags: Mapping[str, str], where: str) -> Tags:
    _refuse_unknown(tags, ("role_tag", "content_tag", *_SPEAKERS), f"{where}.tags")
    role, content = tags.get("role_tag"), tags.get("content_tag")
    return Tags(
        role=Tags().role if role is None else (role,),
        content=Tags().content if content is None else (content,),
        speakers={name: _SPEAKERS[key] for key, name in tags.items() if key in _SPEAKERS},
    )


def _object(entry: Mapping[str, Any], name: str, where: str) -> Mapping[str, str]:
    value = entry.get(name, {})
    if not is_object(value) or not all(isinstance(text, str) for text in value.values()):
        why = "this maps names to names"
        raise UserError(f"{where}.{name}", value, why, 'write {"...": "..."}')
    return value


def _refuse_unknown(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key, value in given.items():
        if key not in known:
            raise UserError(f"{where}.{key}", value, "no such key", did_you_mean(key, known))
