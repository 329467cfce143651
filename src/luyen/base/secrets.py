"""What is not to be read in a file, a log, a message or at a remote logger.

Three kinds: values that came from the environment, which are shown as the reference that was
written; what a name says to be secret (`api_key`, `password`); and passwords inside of addresses.
"""

import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, cast
from urllib.parse import quote

MASK = "***"
"""Stands for what is not shown."""
LEAST_LENGTH = 6
"""Characters of a value that is worth hiding: a shorter one is a word that texts hold anyway."""
_LONG = 16
"""Characters from which on a text that the environment holds too is hardly there by chance."""
SECRET_WORDS = (
    r"api[_-]?key|secret|token|password|passwd|passphrase|credentials?|authorization|"
    r"private[_-]?key|access[_-]?key|secret[_-]?key|signing[_-]?key|pwd|bearer|cookies?"
)
_NAME = re.compile(rf"(?:.*[_.-])?(?:{SECRET_WORDS})", re.IGNORECASE)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
"""Where a name such as `accessToken` begins another word."""
_NOT_SECRET = re.compile(
    r"(?:.*[_.-])?(?:eos|bos|pad|unk|sep|cls|mask|stop|image|tool)_token", re.IGNORECASE
)
ALL_BELOW = ("env", "headers")
"""Blocks of which every value may be secret."""
_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s/'\"@]*(?:@[^\s/'\"@]*)*@")
_QUERY = re.compile(
    rf"([?&;#](?:[\w.-]*[_.-])?(?:{SECRET_WORDS}|key|sig|signature|auth)=)[^&;\s#'\"]+",
    re.IGNORECASE,
)
_MASKED = re.compile(r"://\*{3}@|[?&;#][\w.-]+=\*{3}")
_ASSIGNED = re.compile(
    rf"(?<![\w.-])([\w.-]*?(?:{SECRET_WORDS})[\"']?\s*[=:]\s*)"
    r"(?!\s*[\"']?\$\{)(\"[^\"]*\"|'[^']*'|[^\s,}\]&]+)",
    re.IGNORECASE,
)

KEY_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----"
    r"|\bAKIA[0-9A-Z]{16}\b"
    r"|\bAIza[0-9A-Za-z_-]{35}"
    r"|\bgh[pousr]_[0-9A-Za-z]{36}"
    r"|\bgithub_pat_[0-9A-Za-z_]{40}"
    r"|\bhf_[0-9A-Za-z]{30}"
    r"|\bsk-[0-9A-Za-z_-]{20}"
    r"|\bxox[abeoprs]-[0-9A-Za-z-]{10}"
    r"|\beyJ[0-9A-Za-z_-]{8,2000}+\.eyJ[0-9A-Za-z_-]{8,2000}+\."
)
"""Shapes of private keys and access tokens that common services hand out."""
_lock = threading.Lock()
_shown: dict[str, str] = {}
"""Spelling of a value that must not be read -> what is shown in its place; the longest first."""


def remember(value: str, shown: str = MASK) -> None:
    """Have `masked` show something else for this value from now on, in this process.

    A short value, or a path, is left alone: texts would become unreadable, and paths lead
    somewhere.
    """
    if len(value) < LEAST_LENGTH or value.startswith(("/", "~", "./", "../")):
        return
    spellings = {value, json.dumps(value)[1:-1], repr(value)[1:-1], quote(value, safe="")}
    with _lock:
        found = {**_shown, **dict.fromkeys(spellings, shown)}
        _shown.clear()
        _shown.update(sorted(found.items(), key=lambda pair: -len(pair[0])))


def forget() -> None:
    """Remember nothing."""
    with _lock:
        _shown.clear()


def masked(text: str) -> str:
    """The text without what must not be read in it.

    Example:
        >>> masked("GET https://me:pw@host/v1?api_key=abc&n=2 failed")
        'GET https://***@host/v1?api_key=***&n=2 failed'
    """
    return masked_urls(masked_known(text))


def masked_known(text: str) -> str:
    """The text without the values that `remember` was told."""
    with _lock:
        known = list(_shown.items())
    for value, shown in known:
        text = text.replace(value, shown)
    return text


def masked_urls(text: str) -> str:
    """The text with the passwords and keys of addresses masked."""
    if "://" in text:
        text = _USER.sub(rf"\1{MASK}@", text)
    return _QUERY.sub(rf"\1{MASK}", text) if "=" in text else text


def has_masked_url(text: str) -> bool:
    """Whether a text is what `masked_urls` left of an address.

    Example:
        >>> has_masked_url(masked_urls("https://me:pw@host")), has_masked_url("*** Rate it ***")
        (True, False)
    """
    return _MASKED.search(text) is not None


def masked_words(words: Sequence[str]) -> list[str]:
    """A command line without the values of keys whose names say that they are secret.

    Example:
        >>> masked_words(["train", "a.reward_kwargs.api_key=sk-1", "a.max_tokens=5"])
        ['train', 'a.reward_kwargs.api_key=***', 'a.max_tokens=5']
    """
    return [_ASSIGNED.sub(_assigned, masked(word)) for word in words]


def _assigned(found: re.Match[str]) -> str:
    name = re.split(r"[\"'\s=:]", found.group(1))[0]
    return found.group(1) + MASK if is_secret_name(name) else found.group(0)


def is_secret_name(name: str) -> bool:
    """Whether the last part of a dotted key says that its value is secret.

    Example:
        >>> [is_secret_name(n) for n in ("kwargs.api_key", "max_tokens", "api_key_env", "HF_TOKEN")]
        [True, False, False, True]
        >>> [is_secret_name(n) for n in ("accessToken", "maxTokens", "eosToken")]
        [True, False, False]
    """
    words = _HUMP.sub("_", name)
    return bool(_NAME.fullmatch(words)) and not _NOT_SECRET.fullmatch(words)


def is_from_environment(text: str) -> bool:
    """Whether a text is a secret variable of the environment, or a long one that is no path.

    Example:
        >>> is_from_environment("a constant of a program")
        False
    """
    is_long = len(text) >= _LONG and "/" not in text
    names = [name for name, value in os.environ.items() if value == text]
    return len(text) >= LEAST_LENGTH and any(is_long or is_secret_name(name) for name in names)


def masked_tree(value: Any, name: str = "", *, is_below: bool = False) -> Any:
    """Plain data, at a key of this name, without what must not be read in it.

    Example:
        >>> masked_tree({"url": "http://a:b@c", "password": "x", "n": 1, "token": "${oc.env:T}"})
        {'url': 'http://***@c', 'password': '***', 'n': 1, 'token': '${oc.env:T}'}
    """
    is_secret = is_below or is_secret_name(name)
    if isinstance(value, str):
        text = masked(value)
        return MASK if is_secret and text and "${" not in text else text
    if isinstance(value, Mapping):
        pairs = cast(Mapping[Any, Any], value).items()
        return {
            key: masked_tree(inner, str(key), is_below=is_secret or str(key) in ALL_BELOW)
            for key, inner in pairs
        }
    if isinstance(value, list | tuple):
        kept = [masked_tree(v, name, is_below=is_secret) for v in cast(Sequence[Any], value)]
        return tuple(kept) if isinstance(value, tuple) else kept
    return value


def mask_tracebacks() -> None:
    """Mask secrets in the tracebacks of uncaught exceptions of this process."""

    def show(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
    ) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        sys.stderr.write(masked(text))

    def show_of_thread(args: threading.ExceptHookArgs) -> None:
        show(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook, threading.excepthook = show, show_of_thread
