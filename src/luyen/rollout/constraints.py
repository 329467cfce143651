"""Constraints on answers: JSON of a schema, regular expressions, choices, function calls.

The only file that imports `llguidance`, whose grammars say which tokens may come next. A constraint
is made once per request; its samples begin from copies. Stop tokens are allowed exactly where the
grammar may end. An answer that exceeds the limits of the parser has no allowed token left.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, cast, final

import torch
from jsonschema import Draft202012Validator, SchemaError
from torch import Tensor

from luyen.base.errors import UserError, did_you_mean
from luyen.data.tokenizer import Tokenizer
from luyen.rollout.parsers.json_formats import (
    DEEPSEEK_CALL_BEGIN,
    DEEPSEEK_CALL_END,
    DEEPSEEK_CALLS_BEGIN,
    DEEPSEEK_CALLS_END,
    DEEPSEEK_SEPARATOR,
)
from luyen.rollout.parsers.protocol import flaw, quoted

_WHITESPACE = r"[ \n\t]{0,40}"
"""White space between two parts of a JSON text. Without a bound, an answer may never end."""
_JSON_OPTIONS: dict[str, Any] = {"whitespace_pattern": _WHITESPACE, "lenient": False}


@final
class GrammarConstraint:
    """A grammar over the tokens of one tokenizer."""

    def __init__(self, grammar: str, tokenizer: Tokenizer) -> None:
        """`grammar` is one that `llguidance` has found valid."""
        matcher = _llguidance().LLMatcher
        self._matcher: Any = matcher(_token_table(tokenizer), grammar, log_level=0)
        self._has_text = torch.ones(tokenizer.size, dtype=torch.bool)
        if tokenizer.unknown_id is not None:
            # A forced text is tokenized, and what has no token is then said to be this one.
            self._has_text[tokenizer.unknown_id] = False

    def start(self) -> "GrammarState":
        """The state before the first token."""
        return GrammarState(self._matcher.deep_copy(), self._has_text)


@final
class GrammarState:
    """What a grammar allows after the tokens of one sample."""

    def __init__(self, matcher: Any, has_text: Tensor) -> None:
        """`matcher` is its own; `has_text` are the tokens that stand for some text."""
        self._matcher = matcher
        self._has_text = has_text

    def allowed(self) -> Tensor:
        """Bool `[vocabulary]`: tokens that may come next."""
        marks = bytearray(self._matcher.compute_logit_bias())
        found = torch.frombuffer(marks, dtype=torch.uint8)[: len(self._has_text)] > 0
        # A parser that has reached its limits, maybe just now, would allow an end.
        return found.logical_and_(self._has_text & (not self._matcher.is_error()))

    def accept(self, token: int) -> None:
        """Append an allowed token."""
        self._matcher.consume_token(token)

    @property
    def is_finished(self) -> bool:
        """Whether nothing but a stop token may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


def json_schema_constraint(
    schema: Mapping[str, Any] | bool, tokenizer: Tokenizer, *, field: str = "schema"
) -> GrammarConstraint:
    """Answers are JSON texts that are valid under a schema; `field` names it in messages.

    A UserError names the part of the schema that is wrong, or that no grammar can be made of.
    """
    _refuse_bad_schema(schema, field)
    return GrammarConstraint(_schema_grammar(schema), tokenizer)


def json_object_constraint(tokenizer: Tokenizer) -> GrammarConstraint:
    """Answers are JSON objects."""
    return json_schema_constraint({"type": "object"}, tokenizer)


def regex_constraint(
    pattern: str, tokenizer: Tokenizer, *, field: str = "regex"
) -> GrammarConstraint:
    """Answers match a regular expression as a whole; it has no look-around and no references."""
    why = flaw(pattern) or _grammar_fault(_regex_grammar(pattern))
    if why is not None:
        raise UserError(field, pattern, why, "correct the regular expression")
    return GrammarConstraint(_regex_grammar(pattern), tokenizer)


def choice_constraint(
    options: Sequence[str], tokenizer: Tokenizer, *, field: str = "choice"
) -> GrammarConstraint:
    """Answers are one of these texts."""
    if not options or not all(options):
        why = "an answer has at least one option, and an option some text"
        raise UserError(field, list(options), why, "give texts to choose from")
    why = flaw(list(options))
    if why is not None:
        raise UserError(field, list(options), why, "give texts to choose from")
    words = " | ".join(map(_literal, options))
    return GrammarConstraint(f"%llguidance {{}}\nstart: {words}\n", tokenizer)


# Function calls in the formats that `rollout/parsers` read: arguments are JSON of a schema.

_CALLS: dict[str, tuple[str, str]] = {
    "hermes": ('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
    "mistral": ('[TOOL_CALLS][{"name": "NAME", "arguments": ', "}]"),
    "llama3": ('{"name": "NAME", "parameters": ', "}"),
    "deepseek": (
        f"{DEEPSEEK_CALLS_BEGIN}{DEEPSEEK_CALL_BEGIN}NAME{DEEPSEEK_SEPARATOR}",
        f"{DEEPSEEK_CALL_END}{DEEPSEEK_CALLS_END}",
    ),
    "gpt_oss": ("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", ""),
}
"""Format -> text before and after the arguments of a call."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def call_constraint(
    tools: Sequence[Mapping[str, Any]],
    format: str,
    tokenizer: Tokenizer,
    *,
    field: str = "tools",
) -> GrammarConstraint:
    """Answers are one call of one of these functions, in the format of a tool call parser.

    A tool is `{"name": ..., "parameters": SCHEMA}`, or an object with that under `function`.
    """
    if format not in _CALLS:
        why = "calls of this format cannot be demanded; " + did_you_mean(format, _CALLS)
        raise UserError("tool_choice", format, why, f"use one of {', '.join(_CALLS)}")
    if not tools:
        raise UserError(field, [], "there is no function to call", "name at least one")
    before, after = _CALLS[format]
    rules: list[str] = []
    for place, tool in enumerate(tools):
        name, schema = _function(tool, f"{field}[{place}]")
        _refuse_bad_schema(schema, f"{field}[{place}].parameters")
        head = _spelled(before.replace("NAME", name), tokenizer)
        rules.append(f"call_{place}: {head} {_inline(schema)} {_spelled(after, tokenizer)}")
    names = " | ".join(f"call_{place}" for place in range(len(tools)))
    return GrammarConstraint("\n".join(["%llguidance {}", f"start: {names}", *rules]), tokenizer)


def _function(tool: Mapping[str, Any], field: str) -> tuple[str, Mapping[str, Any]]:
    """Name and schema of the arguments of a tool."""
    inner: Any = tool.get("function", tool)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        why = "a function has a name of at most 64 letters, digits, '_', '.' and '-'"
        raise UserError(f"{field}.name", name, why, "rename it")
    given: Any = cast(Mapping[str, Any], inner).get("parameters") or {}
    if not isinstance(given, Mapping):
        why = "the parameters of a function are a JSON schema"
        raise UserError(f"{field}.parameters", given, why, "give an object")
    return name, {"type": "object", **cast(Mapping[str, Any], given)}


def _inline(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"


def _spelled(text: str, tokenizer: Tokenizer) -> str:
    """Text as a part of a grammar: special tokens by their id, the rest as it is written."""
    table = _token_table(tokenizer)
    ids = {name: i for name, i in tokenizer.markers.items() if table.is_special_token(i)}
    if not ids:
        return _literal(text)
    names = "|".join(map(re.escape, sorted(ids, key=len, reverse=True)))
    parts = [part for part in re.split(f"({names})", text) if part]
    return " ".join(f"<[{ids[part]}]>" if part in ids else _literal(part) for part in parts)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


# Schemas: refused with the place of what is wrong.

_PARTS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems")


def _refuse_bad_schema(schema: Any, field: str) -> None:
    fix = "correct the schema, or ask for less"
    if not isinstance(schema, Mapping | bool):
        raise UserError(field, schema, "a JSON schema is an object", fix)
    why = flaw(schema)
    if why is not None:
        raise UserError(field, "a schema", why, fix)
    try:
        Draft202012Validator.check_schema(cast(Any, schema))
    except SchemaError as error:
        place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error.absolute_path)
        raise UserError(field + place, error.instance, error.message, fix) from error
    why = _grammar_fault(_schema_grammar(schema))
    if why is not None and isinstance(schema, Mapping):
        place, part = _culprit(cast(Mapping[str, Any], schema))
        raise UserError(field + place, part, why, fix)


def _culprit(schema: Mapping[str, Any]) -> tuple[str, Any]:
    """Path and value of the smallest part that no grammar can be made of."""
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    path, part = "", schema
    while True:
        for step, child in _children(part):
            if _grammar_fault(_schema_grammar({**shared, **child})) is not None:
                path, part = path + step, child
                break
        else:
            return path, part


def _children(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The schemas inside a schema, with the step to each."""
    found: list[tuple[str, Any]] = []
    for key in _PARTS:
        if isinstance(schema.get(key), Mapping):
            found += [(f".{key}.{name}", child) for name, child in schema[key].items()]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            found += [(f".{key}[{i}]", child) for i, child in enumerate(schema[key])]
    found += [(f".{key}", schema.get(key)) for key in _SINGLE]
    return [(step, cast(Mapping[str, Any], c)) for step, c in found if isinstance(c, Mapping)]


def _schema_grammar(schema: Any) -> str:
    text = json.dumps(schema)
    return _llguidance().LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)


def _regex_grammar(pattern: str) -> str:
    return _llguidance().LLMatcher.grammar_from_regex(pattern)


def _grammar_fault(grammar: str) -> str | None:
    """Why a grammar is not valid, in one line; None when it is."""
    is_fault, messages = _llguidance().LLMatcher.validate_grammar_with_warnings(grammar)
    return " ".join(" ".join(messages).split()) if is_fault else None


# The tokens as bytes.


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        why = "constrained answers need the package llguidance, which is not installed"
        raise UserError("constraint", "llguidance", why, 'pip install "luyen[serve]"') from error
    return llguidance


@lru_cache(maxsize=4)
def _token_table(tokenizer: Tokenizer) -> Any:
    """What `llguidance` knows of a tokenizer; made once, since it takes a second."""
    library, stops = _llguidance(), sorted(tokenizer.stop_ids)
    if not stops:
        why = "it has no token that ends an answer"
        raise UserError("actor_rollout_ref.model.path", tokenizer.path, why, "name an eos token")
    text = tokenizer.serialized()
    if text is not None:
        try:
            return library.LLTokenizer(text, n_vocab=tokenizer.size, eos_token=stops)
        except ValueError:
            pass  # a kind of tokenizer that the library cannot read
    words = library.TokenizerWrapper(_TokenTexts(tokenizer))
    return library.LLTokenizer(words, n_vocab=tokenizer.size, eos_token=stops)


@final
class _TokenTexts:
    """A tokenizer whose tokens each stand for a text of their own, as `llguidance` wants it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.size)
        texts = [tokenizer.decode([i], skip_special=False) for i in ids]
        if tokenizer.decode(list(ids), skip_special=False) != "".join(texts):
            why = f"its tokens have no text of their own: {quoted(texts[-1])} depends on the rest"
            fix = "constrained answers need a tokenizer of a kind that llguidance reads"
            raise UserError("actor_rollout_ref.model.path", tokenizer.path, why, fix)
        self.tokens = [text.encode() for text in texts]
        self.special_token_ids = sorted(tokenizer.markers[n] for n in tokenizer.special_tokens)
        self.eos_token_id = min(tokenizer.stop_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of a text."""
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode())
