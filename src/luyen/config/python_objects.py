"""Python objects as files of a run: functions that were given to `luyen.train` as objects.

A configuration names files, and a run directory keeps what it was made of. So a function becomes a
file under `RUN/inputs`, named by the digest of its content: the function itself, with all that it
uses, as source text. Every process of the run, and every later one, imports that file; the process
that has the object calls the object itself.

A function that has no source text as a whole (it uses a loaded model, an open file, a secret)
exists in its process only. So does one whose file no longer says what it was compiled from: what
is written is compared with the code of the object. Its file says so when it is imported, and
`check` refuses what needs it elsewhere.
"""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never, final

from luyen.base.errors import UserError
from luyen.base.files import write_whole
from luyen.base.input_files import expanded
from luyen.base.source_files import NoSource, read_source
from luyen.base.source_text import secret_in_source
from luyen.base.user_modules import hold_objects, loaded_module
from luyen.config.objects.object_source import module_text
from luyen.config.plugins import read_python

ABSENT = "object_of_another_process"
"""Called by the file of an object that has no source: the import of such a file fails."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFile:
    """A Python file that stands for objects of this process.

    Example:
        >>> ObjectFile(path=Path("runs/a/b/inputs/reward-ab12.py"), absent=None).path.name
        'reward-ab12.py'
    """

    path: Path
    """The file."""
    absent: str | None
    """Why no other process can have the objects; None: the file has their source."""


def object_of_another_process(name: str, why: str) -> Never:
    """The error of a process that needs an object which only another process had."""
    fix = f"give it again: luyen.train(resume=RUN, ...) with `{name}`, or write it into a file"
    raise UserError("Python object", name, f"the run was given it as an object, and {why}", fix)


def write_objects(
    folder: Path, stem: str, members: Mapping[str, Any], *, end: str = "", live: Mapping[str, Any]
) -> ObjectFile:
    """Write a file `STEM-DIGEST.py` that defines `members`, and `end` after them.

    `live` are the names that the file has in this process, where nothing is imported.
    """
    absent = None
    try:
        rest = {name: one for name, one in live.items() if members.get(name) is not one}
        text = module_text(members, live=rest, taken=_names_of(end) - {*members}) + end
        _refuse_secret(text)
        for one in members.values():  # which may say more to its readers
            _refuse_secret(source_of(one) or "")
    except NoSource as error:
        absent = str(error)
        text = _absent_text(members, live, absent)
    head = '"""Written by luyen.train from objects of a Python process; not to be edited."""\n\n'
    digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    path = (folder / f"{stem}-{digest}.py").absolute()
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, head + text, is_private=True)
    hold_objects(path, live)
    return ObjectFile(path=path, absent=absent)


def _names_of(end: str) -> set[str]:
    """Names that the end of a file gives a value."""
    return {*read_source(end).bindings}


def source_of(function: Any) -> str | None:
    """Source text of a function as its author wrote it; None where there is none."""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return None


def _refuse_secret(text: str) -> None:
    if (place := secret_in_source(text)) is not None:
        raise NoSource(f"{place} is a secret, and a run directory holds none")


def _absent_text(members: Mapping[str, Any], live: Mapping[str, Any], why: str) -> str:
    """A module without the objects: their signatures for the check, and their source to read."""
    name = next(iter(members))
    parts = [f"from {__name__} import {ABSENT}", f"{ABSENT}({name!r}, {why!r})"]
    parts += [_signature(one, value) for one, value in live.items() if callable(value)]
    for one, value in members.items():
        written = source_of(value) or f"an object of {type(value).__name__}"
        if secret_in_source(written) is not None:
            written = "its source holds a secret"
        parts.append("\n".join(f"# {line}" for line in (f"{one}:", *written.splitlines())))
    return "\n\n\n".join(parts) + "\n"


def _signature(name: str, function: Callable[..., Any]) -> str:
    """A definition with the names of a function's arguments and nothing in it."""
    try:
        given = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        given = ()
    plain = [p.name for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in given if p.kind is p.VAR_POSITIONAL), "")
    keyword = [f"{p.name}=None" for p in given if p.kind is p.KEYWORD_ONLY]
    more = [f"**{p.name}" for p in given if p.kind is p.VAR_KEYWORD]
    star = [f"*{rest}"] if rest or keyword else []
    return f"def {name}({', '.join([*plain, *star, *keyword, *more])}): ..."


def is_loaded(path: str) -> bool:
    """Whether this process has the objects of a file, or has imported it."""
    return loaded_module(expanded(path)) is not None


def absent_object(path: str) -> str | None:
    """Name of the object that a file stands for without having its source; None: it is another."""
    try:
        body = read_python(expanded(path)).body
    except OSError:
        return None
    for node in body:
        match node:
            case ast.Expr(
                value=ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=one), _])
            ):
                if name == ABSENT:
                    return str(one)
            case _:
                pass
    return None
