"""Addresses of task sources: `scheme://name?key=value`, checked key by key."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final
from urllib.parse import parse_qsl

from luyen.base.errors import UserError
from luyen.base.suggest import did_you_mean

FIELD = "data.train_files"
"""What errors about an address name, until a caller knows which key it was."""
_WHOLE = re.compile(r"-?[0-9]{1,19}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TaskUrl:
    """An address, taken apart.

    Example:
        >>> parse_task_url("arithmetic://sum?digits=2").query
        {'digits': '2'}
    """

    text: str
    """The address as it was written."""
    scheme: str
    """Who makes the rows."""
    name: str
    """Which rows."""
    query: Mapping[str, str]
    """Values by key, as text."""

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """A UserError unless every key is known."""
        names = list(known)
        for key in self.query:
            if key not in names:
                raise self.error(f"unknown key `{key}`", did_you_mean(key, names))

    def integer(self, key: str, default: int, *, least: int, most: int) -> int:
        """The value of a key as a number within limits."""
        text = self.query.get(key, str(default))
        if not _WHOLE.fullmatch(text) or not least <= int(text) <= most:
            why = f"`{key}={text}` is no whole number from {least} to {most}"
            raise self.error(why, f"write {key}={default}, for instance")
        return int(text)

    def share(self, key: str, default: float) -> float:
        """A number from 0 to 1."""
        if key not in self.query:
            return default
        try:
            value = float(self.query[key])
        except ValueError:
            value = -1.0
        if not 0.0 <= value <= 1.0:
            raise self.error(f"`{key}={self.query[key]}` is not between 0 and 1", "mend it")
        return value

    def choice(self, key: str, default: str, choices: Iterable[str]) -> str:
        """The value of a key that has a closed set of values."""
        text, known = self.query.get(key, default), list(choices)
        if text not in known:
            raise self.error(f"`{key}={text}` is not a choice", did_you_mean(text, known))
        return text

    def error(self, why: str, fix: str) -> UserError:
        """An error about this address."""
        return UserError(FIELD, self.text, why, fix)


def parse_task_url(text: str) -> TaskUrl:
    """The address taken apart; a key given twice or without a value is refused."""
    scheme, _, rest = text.partition("://")
    name, _, written = rest.partition("?")
    pairs = parse_qsl(written, keep_blank_values=True)
    url = TaskUrl(text=text, scheme=scheme, name=name.strip("/"), query=dict(pairs))
    twice = sorted({key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1})
    if twice:
        raise url.error(f"`{twice[0]}` is given twice", "keep one of them")
    empty = [key for key, value in pairs if not value]
    if empty:
        raise url.error(f"`{empty[0]}` has no value", f"write {empty[0]}=VALUE, or drop it")
    return url
