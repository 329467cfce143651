"""What is not to be read in a file, a log, a message or at a remote logger.

Three kinds: values that came from the environment, which are shown as the reference that was
written; what a name says to be secret (`api_key`, `password`); and passwords inside of addresses.
"""

import ast
import io
import json
import os
import re
import sys
import threading
import tokenize
import traceback
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, cast
from urllib.parse import quote

MASK = "***"
"""Stands for what is not shown."""
_LEAST = 6
"""Characters of a value that is worth hiding: a shorter one is a word that texts hold anyway."""
_LONG = 16
"""Characters from which on a text that the environment holds too is hardly there by chance."""
_WORDS = (
    r"api[_-]?key|secret|token|password|passwd|passphrase|credentials?|authorization|"
    r"private[_-]?key|access[_-]?key|secret[_-]?key|signing[_-]?key|pwd|bearer|cookies?"
)
_NAME = re.compile(rf"(?:.*[_.-])?(?:{_WORDS})", re.IGNORECASE)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
"""Where a name such as `accessToken` begins another word."""
_NOT_SECRET = re.compile(
    r"(?:.*[_.-])?(?:eos|bos|pad|unk|sep|cls|mask|stop|image|tool)_token", re.IGNORECASE
)
_ALL_BELOW = ("env", "headers")
"""Blocks of which every value may be secret."""
_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s/'\"@]*(?:@[^\s/'\"@]*)*@")
_QUERY = re.compile(
    rf"([?&;#](?:[\w.-]*[_.-])?(?:{_WORDS}|key|sig|signature|auth)=)[^&;\s#'\"]+", re.IGNORECASE
)
_MASKED = re.compile(r"://\*{3}@|[?&;#][\w.-]+=\*{3}")
_ASSIGNED = re.compile(
    rf"(?<![\w.-])([\w.-]*?(?:{_WORDS})[\"']?\s*[=:]\s*)"
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
_SAID = re.compile(
    rf"(?<![\w.-])[\w.-]*?(?:{_WORDS})[\"']?\s*[=:]\s*"
    r"(?:[\"'][^\"']{6,}[\"']|(?=[^\s,;)]*[0-9])(?=[^\s,;)]*[A-Za-z])[^\s,;)]{8,})",
    re.IGNORECASE,
)
"""A name and what looks like its value, in text for people."""

_lock = threading.Lock()
_shown: dict[str, str] = {}
"""Spelling of a value that must not be read -> what is shown in its place; the longest first."""


def remember(value: str, shown: str = MASK) -> None:
    """Have `masked` show something else for this value from now on, in this process.

    A short value, or a path, is left alone: texts would become unreadable, and paths lead
    somewhere.
    """
    if len(value) < _LEAST or value.startswith(("/", "~", "./", "../")):
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
    return len(text) >= _LEAST and any(is_long or is_secret_name(name) for name in names)


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
            key: masked_tree(inner, str(key), is_below=is_secret or str(key) in _ALL_BELOW)
            for key, inner in pairs
        }
    if isinstance(value, list | tuple):
        kept = [masked_tree(v, name, is_below=is_secret) for v in cast(Sequence[Any], value)]
        return tuple(kept) if isinstance(value, tuple) else kept
    return value


def secret_in_source(text: str) -> str | None:
    """Where a Python source text holds a secret; None: no place that a name or a shape shows.

    Text under a name that says nothing, and of no known shape, is found only if a variable of the
    environment with a secret name has it.

    Example:
        >>> secret_in_source("def f(x, api_key='abc'): return x")
        '`api_key`'
        >>> secret_in_source("api_key = os.environ['API_KEY']")
    """
    values = {v for n, v in os.environ.items() if is_secret_name(n) and len(v) >= _LEAST}
    if any(value in text for value in values) or masked_known(text) != text:
        return "a value of the environment or of the configuration"
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in ast.walk(tree):
        for name, value in _named_values(node):
            if is_secret_name(name) and _has_text(value):
                return f"`{name}`"
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            piece = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
            if _looks_secret(piece):
                return f"a text in line {node.lineno}"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and _looks_secret(token.string):
            return f"the comment in line {token.start[0]}"
    return None


def _looks_secret(text: str) -> bool:
    is_shaped = KEY_SHAPES.search(text) is not None or masked_urls(text) != text
    return is_shaped or any("${" not in found[0] for found in _SAID.finditer(text))


def _named_values(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Values that a piece of source gives a name, with the name."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _assigned_values(target, value)
        case ast.AnnAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
            if value is not None:
                yield from _assigned_values(target, value)
        case ast.keyword(arg=str(name), value=value):
            yield name, value
        case ast.arguments():
            plain = [*node.posonlyargs, *node.args]
            pairs = [*zip(reversed(plain), reversed(node.defaults), strict=False)]
            pairs += [(a, d) for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True) if d]
            yield from ((argument.arg, default) for argument, default in pairs)
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant):
                    is_block = key.value in _ALL_BELOW and isinstance(value, ast.Dict)
                    below = value.values if is_block and isinstance(value, ast.Dict) else [value]
                    yield from (("secret" if is_block else str(key.value), one) for one in below)
        case ast.Tuple(elts=[ast.Constant(value=str(name)), value]):
            yield name, value
        case _:
            pass


def _assigned_values(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match target, value:
        case ast.Name(id=name) | ast.Attribute(attr=name), _:
            yield name, value
        case ast.Subscript(slice=ast.Constant(value=str(name))), _:
            yield name, value
        case ast.Tuple(elts=names), ast.Tuple(elts=values) if len(names) == len(values):
            for one, inner in zip(names, values, strict=True):
                yield from _assigned_values(one, inner)
        case _:
            pass


def _has_text(value: ast.expr) -> bool:
    """Whether a value is made of text that is written there, and not of calls and names."""
    match value:
        case ast.Constant(value=str() | bytes() as text):
            return bool(text) and "${" not in str(text)
        case ast.BinOp() | ast.BoolOp() | ast.JoinedStr() | ast.Tuple() | ast.List() | ast.Set():
            inner = ast.iter_child_nodes(value)
            return any(_has_text(one) for one in inner if isinstance(one, ast.expr))
        case ast.Dict(values=values):
            return any(_has_text(one) for one in values)
        case ast.Subscript(value=whole):
            return _has_text(whole)
        case _:
            return False


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
