"""Whether the tokenizer files of a folder, its chat template among them, can be read."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from luyen.config.model_folder.chat_template import template_fault, template_remarks
from luyen.config.model_folder.files import InvalidFile, read_object, read_text, short_repr, size_of

_FAST, _CONFIG, _GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
_OTHERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_KINDS = ("BPE", "WordPiece", "WordLevel", "Unigram")
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "sep_token")
_AGAIN = "fetch the tokenizer's files again"


def tokenizer_faults(folder: Path, rows: int | None) -> Iterator[InvalidFile]:
    """What is wrong with tokenizer, template and ends of turns; `rows` are the embedding's."""
    if all(size_of(folder, name) is None for name in (_FAST, _CONFIG, *_OTHERS)):
        why = f"it is not there, nor is {_OTHERS[0]}"
        fix = "put the tokenizer's files there, or set actor_rollout_ref.model.tokenizer_path"
        yield InvalidFile(_FAST, why, fix)
        return
    size_of(folder, _OTHERS[0])
    count = known_ids(folder)
    if count is not None and rows is not None and count > rows:
        yield too_many_ids(count, rows)
    config = read_object(folder, _CONFIG) or {}
    yield from _name_faults(_CONFIG, config)
    special = read_object(folder, "special_tokens_map.json")
    yield from _name_faults("special_tokens_map.json", special or {})
    read_object(folder, "added_tokens.json")
    file, source = template_of(folder, config)
    named = _special({**(special or {}), **config})
    why = template_fault(source, named) if source is not None else None
    if why is not None:
        yield InvalidFile(file, f"the chat template: {why}", "correct the template")


def tokenizer_remarks(folder: Path) -> list[str]:
    """What a user should know of a chat template that can be used."""
    config = read_object(folder, _CONFIG) or {}
    special = read_object(folder, "special_tokens_map.json") or {}
    source = template_of(folder, config)[1]
    return [] if source is None else template_remarks(source, _special({**special, **config}))


def too_many_ids(count: int, rows: int) -> InvalidFile:
    """A tokenizer that makes ids for which the model has no row: it is another model's."""
    why = f"it makes ids up to {count - 1}, and the model has {rows} rows (vocab_size)"
    return InvalidFile(_FAST, why, "give the tokenizer of this model")


def known_ids(folder: Path) -> int | None:
    """One more than the largest id of `tokenizer.json`; None where there is no such file."""
    found = read_object(folder, _FAST)
    if found is None:
        return None
    inner = found.get("model")
    model = cast(dict[str, Any], inner) if isinstance(inner, dict) else {}
    kind = model.get("type", "BPE")
    if not model or kind not in _KINDS:
        why = (
            f"its model is {short_repr(inner)}"
            if not model
            else f"its model is of type {short_repr(kind)}"
        )
        raise InvalidFile(_FAST, f"{why}, which is no model of a tokenizer", _AGAIN)
    vocabulary: Any = model.get("vocab")
    if isinstance(vocabulary, list):
        ids: list[Any] = [*range(len(cast(list[Any], vocabulary)))]
    elif isinstance(vocabulary, dict):
        ids = [*cast(dict[str, Any], vocabulary).values()]
    else:
        raise InvalidFile(_FAST, f"its vocabulary is {short_repr(vocabulary)}", _AGAIN)
    added: Any = found.get("added_tokens") or []
    if not isinstance(added, list):
        raise InvalidFile(_FAST, f"its added_tokens are {short_repr(added)}, not a list", _AGAIN)
    entries = cast(list[Any], added)
    ids += [cast(dict[str, Any], e).get("id") if isinstance(e, dict) else None for e in entries]
    odd = [i for i in ids if type(i) is not int or i < 0]
    if odd:
        raise InvalidFile(_FAST, f"it gives a token the id {short_repr(odd[0])}", _AGAIN)
    return max(ids, default=-1) + 1


def vocabulary(folder: Path) -> dict[str, int] | None:
    """Every token of `tokenizer.json` with its id; None where there is no such file."""
    if not known_ids(folder):
        return None
    found = read_object(folder, _FAST) or {}
    listed: Any = found["model"]["vocab"]
    if isinstance(listed, list):
        tokens = {str(token): i for i, (token, *_) in enumerate(cast(list[Any], listed))}
    else:
        tokens = dict(cast(dict[str, int], listed))
    added = cast(list[dict[str, Any]], found.get("added_tokens") or [])
    return tokens | {str(entry.get("content")): int(entry["id"]) for entry in added}


def template_of(folder: Path, config: Mapping[str, Any]) -> tuple[str, str | None]:
    """The file of the chat template and its text; None where there is none.

    A file of its own comes before what `tokenizer_config.json` says; of several the default one.
    """
    own = read_text(folder, "chat_template.jinja")
    if own is not None:
        return "chat_template.jinja", own
    older = read_object(folder, "chat_template.json")
    file, given = _CONFIG, config.get("chat_template")
    if given is None and older is not None:
        file, given = "chat_template.json", older.get("chat_template")
    if isinstance(given, list):
        named: dict[Any, Any] = {}
        for entry in cast(list[Any], given):
            if not isinstance(entry, dict) or not {"name", "template"} <= entry.keys():
                raise InvalidFile(
                    file, f"chat_template lists {short_repr(entry)}", "correct the template"
                )
            named[entry["name"]] = entry["template"]
        given = named
    if isinstance(given, dict):
        given = cast(dict[str, Any], given).get("default")
    if not isinstance(given, str | None):
        raise InvalidFile(
            file, f"chat_template is {short_repr(given)}, not a text", "correct the template"
        )
    return file, given


def end_ids(folder: Path, rows: int | None) -> tuple[int, ...]:
    """Ids that `generation_config.json` ends a turn with; InvalidFile where they are no ids."""
    found = read_object(folder, _GENERATION)
    named: Any = None if found is None else found.get("eos_token_id")
    ids = [] if named is None else cast(list[Any], named if isinstance(named, list) else [named])
    for one in ids:
        if type(one) is not int or one < 0:
            why = f"eos_token_id is {short_repr(one)}; an id, or a list of ids, is due"
            raise InvalidFile(_GENERATION, why, "correct the file, or remove it")
        if rows is not None and one >= rows:
            why = f"eos_token_id is {one}, and the model has {rows} rows (vocab_size)"
            raise InvalidFile(_GENERATION, why, "correct the file, or remove it")
    return tuple(ids)


def _special(given: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name as a template sees them; an empty text where no file names one."""
    found = {name: given.get(name) for name in _TOKENS}
    inner = {
        name: cast(dict[str, Any], value).get("content") if isinstance(value, dict) else value
        for name, value in found.items()
    }
    return {name: value if isinstance(value, str) else "" for name, value in inner.items()}


def _name_faults(file: str, given: Mapping[str, Any]) -> Iterator[InvalidFile]:
    """Special tokens are texts, or objects with one."""
    for name in _TOKENS:
        value: Any = given.get(name)
        if isinstance(value, dict):
            value = cast(dict[str, Any], value).get("content")
        if not isinstance(value, str | None):
            yield InvalidFile(file, f"{name} is {short_repr(given[name])}, not a token", _AGAIN)
    kind = given.get("tokenizer_class")
    if not isinstance(kind, str | None):
        yield InvalidFile(file, f"tokenizer_class is {short_repr(kind)}, not a name", _AGAIN)
