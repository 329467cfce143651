"""Small files that say of themselves whether they are as they were written.

A sealed JSON object holds the SHA-256 of its other content under `seal`; a sealed text begins with
a comment line that holds the SHA-256 of what follows. One changed bit is thus found on reading.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from luyen.base.errors import UserError
from luyen.base.files import json_page, plain
from luyen.base.reading import read_bytes

_KEY = "seal"
_LINE = re.compile(r"# sha256 of what follows: ([0-9a-f]{64})")
_FIX = "restore it from a copy"


def sealed_page(value: Mapping[str, Any]) -> str:
    """Indented JSON with its seal.

    Example:
        >>> sorted(json.loads(sealed_page({"seed": 1})))
        ['seal', 'seed']
    """
    assert _KEY not in value, "the content has a seal of its own"
    return json_page({**value, _KEY: _seal_of(value)})


def unsealed(page: dict[str, Any], path: Path, *, is_demanded: bool) -> dict[str, Any]:
    """What was read from `path` without its seal; a UserError when it does not fit the seal.

    A page without a seal is given back as it is, unless one `is_demanded`.

    Example:
        >>> unsealed({"seed": 1}, Path("manifest.json"), is_demanded=False)
        {'seed': 1}
    """
    if _KEY not in page and not is_demanded:
        return page
    body = {name: value for name, value in page.items() if name != _KEY}
    if page.get(_KEY) != _seal_of(body):
        raise _changed(path)
    return body


def sealed_text(text: str) -> str:
    """The text with its seal as a first line, which YAML reads as a comment.

    Example:
        >>> sealed_text("seed: 1\\n").splitlines()[1]
        'seed: 1'
    """
    return f"# sha256 of what follows: {_hash(text)}\n{text}"


def read_sealed_text(path: Path, *, is_demanded: bool) -> str:
    """The text below the seal; a UserError when it does not fit, or the file cannot be read.

    A file without a seal is read as it is, unless one `is_demanded`.
    """
    try:
        # As bytes first: reading as text would make "\r\n" and "\n" the same.
        whole = read_bytes(path).decode()
    except FileNotFoundError as error:
        raise UserError("file", str(path), "it is missing", _FIX) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("file", str(path), f"it cannot be read: {error}", _FIX) from error
    first, _, rest = whole.partition("\n")
    found = _LINE.fullmatch(first)
    if found is None and not is_demanded:
        return whole
    if found is None or found.group(1) != _hash(rest):
        raise _changed(path)
    return rest


def _seal_of(value: Mapping[str, Any]) -> str:
    return _hash(json.dumps(plain(value), sort_keys=True))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _changed(path: Path) -> UserError:
    return UserError("file", str(path), "it is not as it was written: its seal does not fit", _FIX)
