"""The tokenizer and its chat template: the one file of `data/` that imports transformers."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast, final

from transformers import AutoTokenizer, GenerationConfig
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from luyen.base.boundary import library_faults
from luyen.base.errors import UserError
from luyen.base.records import Message
from luyen.config.model_folder.chat_template import (
    TemplateError,
    render,
    template_fault,
    template_remarks,
    variables,
)
from luyen.config.model_folder.check import (
    refuse,
    sound,
    tokenizer_folder_faults,
)
from luyen.config.model_folder.files import folder_of, locate
from luyen.config.model_folder.tokenizer import end_ids

# Upper bound on the characters one token can stand for, so that a text that is far too long is
# rejected before it is tokenized.
#
# The bound exists only for tokenizers that never drop text and never map unknown text of any length
# to a single token. Texts for every other tokenizer are tokenized in full.

_COMPOSED = 4
"""Characters that a normal form may write as one."""
_NORMALISED = {
    "NFC": _COMPOSED,
    "NFKC": _COMPOSED,
    "NFD": 1,
    "NFKD": 1,
    "Lowercase": 1,
    "Prepend": 1,
    "ByteLevel": 1,
}
"""Kind of a normaliser -> characters that it may write as one."""
_SPLITS = ("ByteLevel", "Split", "Digits", "Punctuation", "Metaspace", "UnicodeScripts")
_EACH_ALONE = ("[\\s\\S]", "(?s:.)")
"""Patterns that make a piece of every character."""


def longest_token(page: str) -> int | None:
    """Most characters of text that one token covers, by a `tokenizer.json`; None: unknown.

    Example:
        >>> longest_token('{"model": {"type": "BPE", "vocab": {"a": 0, "ab": 1}, '
        ...               '"byte_fallback": true}, "added_tokens": [{"content": "<end>"}]}')
        5
    """
    read: dict[str, Any] = json.loads(page)
    model: dict[str, Any] = read["model"]
    added: list[dict[str, Any]] = read.get("added_tokens") or []
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None  # such a token absorbs all adjacent white space
    factor = _factor(read.get("normalizer"))
    pieces = list(_kinds(read.get("pre_tokenizer")))
    if factor is None or not all(map(_keeps_all, pieces)) or not _covers(model, pieces):
        return None
    names: list[str] = [token["content"] for token in added]
    if model.get("type") == "Unigram":
        names += [one[0] for one in model["vocab"]]
    else:
        names += model["vocab"]
    return factor * max(map(len, names), default=1)


def _kinds(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normaliser or a pre-tokenizer, those of a sequence one by one."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    inner: Any = part.get("normalizers") or part.get("pretokenizers") or []
    return [kind for one in cast(list[dict[str, Any]], inner) for kind in _kinds(one)]


def _factor(normaliser: dict[str, Any] | None) -> int | None:
    """Characters that a normaliser may write as one; None: it may leave some out."""
    factor = 1
    for step in _kinds(normaliser):
        if step["type"] == "Replace":
            wanted = step["pattern"].get("String")
            if wanted is None or len(step["content"]) < len(wanted):
                return None
        elif step["type"] in _NORMALISED:
            factor *= _NORMALISED[step["type"]]
        else:
            return None
    return factor


def _keeps_all(step: dict[str, Any]) -> bool:
    return step["type"] in _SPLITS and step.get("behavior") != "Removed"


def _covers(model: dict[str, Any], pieces: list[dict[str, Any]]) -> bool:
    """Whether every character, known or not, is part of a token that is in the vocabulary."""
    if model.get("byte_fallback"):
        return True
    if model.get("type") == "WordLevel":  # any piece is one token: they must be single characters
        patterns = [step.get("pattern", {}).get("Regex") for step in pieces]
        return any(pattern in _EACH_ALONE for pattern in patterns)
    if model.get("type") != "BPE" or model.get("fuse_unk"):
        return False
    is_bytes = any(step["type"] == "ByteLevel" for step in pieces)
    return (is_bytes and len(model["vocab"]) >= 256) or model.get("unk_token") is not None


_FIELD = "actor_rollout_ref.model.path"
_PROBE = "Kp7"
_auto_tokenizer: Any = AutoTokenizer  # untyped beyond this point
_generation_config: Any = GenerationConfig
_fast: Any = TokenizersBackend
_SHORT = 4096
"""Characters, or ids, of a text that is read within some milliseconds."""
_READING = (
    "__call__",
    "encode",
    "_encode_plus",
    "_convert_encoding",
    "set_truncation_and_padding",
    "decode",
    "_decode",
)
"""What a kind of tokenizer may do in its own way."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """How a chat template closes what the assistant says.

    Example:
        >>> TurnEnd(text="<|im_end|>", token=3, trailing="\\n").text
        '<|im_end|>'
    """

    text: str
    """What follows the content, up to its first special token: the policy must write it."""
    token: int | None
    """Id of that special token; None when the template closes a turn with plain text."""
    trailing: str
    """Text the template adds after that token; it is never sampled."""


@final
class Tokenizer:
    """Text to ids and back, and messages to text. Nothing is ever added or padded silently.

    Example:
        >>> tokenizer = load_tokenizer("builtin://arithmetic")
        >>> tokenizer.decode(tokenizer.encode("12+34="))
        '12+34='
    """

    def __init__(
        self,
        backend: Any,
        *,
        path: str,
        generation_stops: Sequence[int] = (),
        more_stops: Sequence[str] = (),
    ) -> None:
        """`backend` is a transformers tokenizer; `generation_stops` come with the model.

        `more_stops` are tokens that end a turn in the format of the run's tool calls; those that
        the tokenizer does not have are passed over.
        """
        self._backend = backend
        self._rust = _plain_rust(backend)
        self.path = path
        self.size: int = len(backend)
        """Ids the tokenizer knows; a model may have rows beyond them that mean nothing."""
        self.special_tokens: tuple[str, ...] = tuple(map(str, backend.all_special_tokens))
        self.markers: dict[str, int] = self._find_markers()
        """Text that is one token wherever it stands, and its id: special and added tokens.

        Runs of white space and single characters, which some tokenizers add, mark nothing."""
        self.unknown_id: int | None = backend.unk_token_id
        """Id that stands for what has no token; None where everything has one."""
        self.has_template: bool = backend.chat_template is not None
        if self.has_template:
            self._refuse_unusable_template()
        self.turn_end = self._find_turn_end() if self.has_template else None
        own = backend.eos_token_id
        self.end_id: int | None = own
        """Id that ends a text; None where the tokenizer has none."""
        self.pad_id: int | None = backend.pad_token_id
        """Padding id of the tokenizer, or None. Luyen itself never pads."""
        closing = self.turn_end.token if self.turn_end is not None else None
        calling = [self.markers[name] for name in more_stops if name in self.markers]
        stops = {i for i in (own, closing, *generation_stops, *calling) if i is not None}
        self.stop_ids: frozenset[int] = frozenset(stops)
        """Ids that end a turn: the tokenizer's, the model's and the template's together."""

    def fingerprint(self) -> tuple[str, str | None]:
        """Hashes of how text becomes ids, and of the chat template; None where there is none.

        Tokenizers with equal hashes make the same ids of every conversation.
        """
        backend = self._backend
        known = json.dumps(
            [self.serialized() or "", backend.get_vocab(), self.markers], sort_keys=True
        )
        template = json.dumps(backend.chat_template) if self.has_template else None
        return _digest(known), None if template is None else _digest(template)

    def difference(self, other: "Tokenizer") -> str | None:
        """How the ids of another tokenizer differ from these, in words; None: they do not."""
        mine: dict[str, int] = self._backend.get_vocab()
        theirs: dict[str, int] = other._backend.get_vocab()
        if self.size != other.size:
            return f"it knows {other.size} ids where {self.size} are known here"
        odd = sorted(token for token in mine.keys() | theirs.keys() if _unlike(mine, theirs, token))
        if not odd:
            return None
        first = odd[0]
        return f"{len(odd)} tokens have other ids: {first!r} is {theirs.get(first)} there and " + (
            f"{mine.get(first)} here"
        )

    def encode(self, text: str) -> list[int]:
        """Ids of exactly this text: special tokens only where the text spells them."""
        if self._rust is not None and len(text) <= _SHORT:
            return cast(list[int], self._rust.encode(text, add_special_tokens=False).ids)
        return cast(list[int], self._backend.encode(text, add_special_tokens=False))

    def least_tokens(self, text: str) -> int:
        """A number below which the tokens of a text are never: found without reading it."""
        return len(text) // self._longest if self._longest is not None else 0

    @cached_property
    def _longest(self) -> int | None:
        """Most characters that one token covers; None where that is not known."""
        page = self.serialized()
        return None if page is None else longest_token(page)

    def serialized(self) -> str | None:
        """The text of its `tokenizer.json`; None where it has none."""
        backend = self._backend
        return cast(str, backend.backend_tokenizer.to_str()) if backend.is_fast else None

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]] | None]:
        """Ids, and for each the characters it covers; None where the tokenizer cannot say."""
        if self._rust is not None and len(text) <= _SHORT:
            read = self._rust.encode(text, add_special_tokens=False)
            return cast(list[int], read.ids), cast(list[tuple[int, int]], read.offsets)
        if not self._backend.is_fast:
            return self.encode(text), None
        found = self._backend(text, add_special_tokens=False, return_offsets_mapping=True)
        return cast(list[int], found["input_ids"]), [tuple(s) for s in found["offset_mapping"]]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of the ids, with or without special tokens, and otherwise as it stands."""
        if self._rust is not None and len(ids) <= _SHORT:
            return cast(str, self._rust.decode(list(ids), skip_special_tokens=skip_special))
        return cast(
            str,
            self._backend.decode(
                list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
            ),
        )

    def apply_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the model reads it."""
        if not self.has_template:
            fix = "use an instruction-tuned model, or set model.tokenizer_path to such a tokenizer"
            raise UserError(_FIELD, self.path, "its tokenizer has no chat template", fix)
        more = dict(template_kwargs or {})
        given = variables(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            special=self._backend.special_tokens_map,
        )
        try:
            return render(self._template(tools, more.pop("chat_template", None)), {**given, **more})
        except TemplateError as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            why = f"its chat template refuses a conversation of {roles}: {error}"
            raise UserError(_FIELD, self.path, why, "correct the rows or the template") from error

    def remarks(self) -> list[str]:
        """What a user should know of the chat template, a sentence each."""
        if not self.has_template:
            return []
        return template_remarks(self._template(()), self._backend.special_tokens_map)

    def _template(self, tools: Sequence[Mapping[str, Any]], name: str | None = None) -> str:
        """The template for a conversation with or without tools, or the one of this name."""
        fix = "correct the chat template in the tokenizer's files"
        with library_faults("no chat template", field=_FIELD, path=self.path, fix=fix):
            found: Any = self._backend.get_chat_template(name, [*tools] or None)
            if isinstance(found, str):
                return found
            raise TypeError(f"it is {type(found).__name__}, not a text")

    def _refuse_unusable_template(self) -> None:
        why = template_fault(self._template(()), self._backend.special_tokens_map)
        if why is not None:
            said = f"the chat template: {why}"
            raise UserError(_FIELD, self.path, said, "correct the template")

    def _find_turn_end(self) -> TurnEnd:
        turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        tail = self.apply_template(turn).rpartition(_PROBE)[2]
        special = [token for token in self.markers if token in tail]
        if not special:
            return TurnEnd(text=tail, token=None, trailing="")
        first = min(special, key=lambda token: (tail.index(token), -len(token)))
        end = tail.index(first) + len(first)
        return TurnEnd(text=tail[:end], token=self.markers[first], trailing=tail[end:])

    def _find_markers(self) -> dict[str, int]:
        names = {*self.special_tokens, *map(str, self._backend.get_added_vocab())}
        whole = sorted(name for name in names if len(name.strip()) > 1)
        return {name: self._backend.convert_tokens_to_ids(name) for name in whole}


def _unlike(mine: Mapping[str, int], theirs: Mapping[str, int], token: str) -> bool:
    return mine.get(token) != theirs.get(token)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def load_tokenizer(
    path: str,
    *,
    trust_remote_code: bool = False,
    model_path: str | None = None,
    more_stops: Sequence[str] = (),
) -> Tokenizer:
    """The tokenizer of a directory, a hub id or a `builtin://` name.

    `model_path` says where the model lies when the tokenizer comes from elsewhere: the model's
    generation config may name more ids that end a turn. `more_stops`: see `Tokenizer`.
    """
    field = _FIELD if model_path in (None, path) else "actor_rollout_ref.model.tokenizer_path"
    where, model = locate(path, field=field), folder_of(model_path or path)
    if Path(where).is_dir():
        refuse(tokenizer_folder_faults(Path(where), model=model), field=field, path=path)
    what = "no tokenizer can be loaded from it"
    fix = "give a directory with tokenizer files, a hub id, or set model.tokenizer_path"
    stops = _generation_stops(model_path or path, model)
    with library_faults(what, field=field, path=path, fix=fix):
        backend = _auto_tokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)
        return Tokenizer(backend, path=path, generation_stops=stops, more_stops=more_stops)


def resolve_path(path: str) -> str:
    """The directory behind a `builtin://` name; any other path as it is."""
    found = folder_of(path)
    return path if found is None else str(found)


def _generation_stops(path: str, folder: Path | None) -> tuple[int, ...]:
    """Ids that the model's generation config ends a turn with."""
    if folder is not None:
        return sound(lambda: end_ids(folder, None), field=_FIELD, path=path)
    try:
        named = _generation_config.from_pretrained(path).eos_token_id
    except OSError:  # many models on the hub come without the file
        return ()
    if named is None:
        return ()
    return (named,) if isinstance(named, int) else tuple(named)


def _plain_rust(backend: Any) -> Any | None:
    """What a tokenizer asks for ids and for text, where it adds nothing; None: ask it itself.

    A direct call wakes no threads for a single text, and takes less than half the time.
    The call holds the GIL, so long texts take the other way.
    """
    if not isinstance(backend, _fast) or backend.split_special_tokens:
        return None
    kind: Any = cast(Any, type(backend))
    if any(getattr(kind, name) is not getattr(_fast, name) for name in _READING):
        return None
    backend("", add_special_tokens=False)  # its files may ask for padding, and this call does not
    return backend.backend_tokenizer
