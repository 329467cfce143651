"""Everything that the files of a model say against using it, for `check` and for loading."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from luyen.base.errors import UserError
from luyen.config.model_folder.files import UnsoundFile, all_faults, size_of
from luyen.config.model_folder.names import unknown_names
from luyen.config.model_folder.sizes import read_config, size_faults, text_config
from luyen.config.model_folder.tokenizer import end_ids, tokenizer_faults, tokenizer_remarks
from luyen.config.model_folder.weights import read_tensors, tensor_faults

T = TypeVar("T")
_LAYERS = "num_hidden_layers"


def model_faults(
    folder: Path, *, override: Mapping[str, Any], has_weights: bool = True, has_head: bool = True
) -> list[UnsoundFile]:
    """What is wrong with config and weights; without `has_weights` they are drawn at random."""

    def found() -> Iterator[UnsoundFile]:
        raw = read_config(folder)
        config = text_config(raw, override)
        wrong = [*unknown_names(raw, override), *size_faults(config)]
        yield from wrong
        if size_of(folder, "adapter_config.json") is not None:
            why = "an adapter lies beside the model, and would be put on it without a word"
            fix = "give it a folder of its own, and name that in model.lora_adapter_path"
            yield UnsoundFile("adapter_config.json", why, fix)
        if has_weights and not wrong:
            tensors = read_tensors(folder)
            if tensors is not None:
                is_cut = _LAYERS in override
                yield from tensor_faults(tensors, config, has_head=has_head, is_cut=is_cut)
        end_ids(folder, _rows(config))

    return all_faults(found())


def tokenizer_folder_faults(
    folder: Path, *, model: Path | None, override: Mapping[str, Any] | None = None
) -> list[UnsoundFile]:
    """What is wrong with a tokenizer's files; `model` is the folder with the sizes, if known.

    `override` replaces values of the model's config.
    """

    def found() -> Iterator[UnsoundFile]:
        if size_of(folder, "config.json") is not None:
            # Which tokenizer a folder holds is asked of its config too.
            yield from size_faults(text_config(read_config(folder), {}))
        yield from tokenizer_faults(folder, _rows_of(model, override or {}))

    return all_faults(found())


def folder_remarks(folder: Path) -> list[str]:
    """What a user should know of the folder's chat template; nothing where it cannot be used."""
    try:
        return tokenizer_remarks(folder)
    except UnsoundFile:
        return []


def refuse(faults: Iterable[UnsoundFile], *, field: str, path: str) -> None:
    """A UserError for the first fault, in the words of `check`."""
    for fault in faults:
        raise UserError(field, path, fault.words, fault.fix)


def sound(read: Callable[[], T], *, field: str, path: str) -> T:
    """What `read` returns; an unsound file becomes a UserError."""
    try:
        return read()
    except UnsoundFile as fault:
        raise UserError(field, path, fault.words, fault.fix) from fault


@contextmanager
def library_faults(what: str, *, field: str, path: str, fix: str) -> Generator[None]:
    """Turn whatever a library raises over the files of a model into a UserError.

    Files of strangers make it raise anything, panics of compiled code among it, which are no
    Exception.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise UserError(field, path, f"{what}: {_first_line(error)}", fix) from error


def _first_line(error: BaseException) -> str:
    """What an error says first; a line that ends in a colon goes on in the next."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]).rstrip(".")[:300]
    if isinstance(error, OSError | ValueError) and said:
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _rows_of(model: Path | None, override: Mapping[str, Any]) -> int | None:
    try:
        return None if model is None else _rows(text_config(read_config(model), override))
    except UnsoundFile:
        return None  # said where the model is looked at


def _rows(config: Mapping[str, Any]) -> int | None:
    value = config.get("vocab_size")
    return value if type(value) is int and value > 0 else None
