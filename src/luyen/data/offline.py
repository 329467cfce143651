"""Rows for offline training: read in any format, checked, filtered by length, and ordered."""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar, cast, final

from luyen.base.errors import UserError
from luyen.base.records import Message, Prompt, make_prompt
from luyen.config.schema.data import DataConfig
from luyen.data.build import (
    TrainData,
    build_sampler,
    check_tools_are_rendered,
    num_leaked,
    prompt_names,
)
from luyen.data.formats.detect import FORMS, Kind
from luyen.data.formats.read import FILE, PromptOptions, RowReader, open_rows
from luyen.data.formats.records import (
    AnyRow,
    ConversationRow,
    LabelledRow,
    PreferenceRow,
    SteppedRow,
    TextRow,
)
from luyen.data.formats.render import (
    render_answer,
    render_conversation,
    render_pair,
    render_steps,
)
from luyen.data.messages import find_markers
from luyen.data.render import Renderer
from luyen.data.row_store import Origins, RowWriter, selected, stored_like
from luyen.data.rows import RowAt, frame_of
from luyen.data.sources import Dataset, RowSource, about, rows_wanted
from luyen.data.tokenizer import Tokenizer

# Lengths: tokens of a row's longest sequence, and whether it has anything to learn.

_SLACK = 2
"""What a template leaves out of an earlier turn in a later one is not counted this often."""
_SHORT = 100_000
"""Characters that are read within a fraction of a second."""


def longest(row: AnyRow, renderer: Renderer) -> int:
    """Tokens of the longest sequence that the row makes, prompt included.

    Example:
        >>> from luyen.data.tokenizer import load_tokenizer
        >>> longest(TextRow(text="1+1=2"), Renderer(load_tokenizer("builtin://arithmetic")))
        5
    """
    match row:
        case PreferenceRow():
            pair = render_pair(row, renderer, allow_whole=True)
            return len(pair.prompt) + max(len(pair.chosen.tokens), len(pair.rejected.tokens))
        case LabelledRow():
            return len(render_answer(row, renderer).tokens)
        case SteppedRow():
            steps = render_steps(row, renderer)
            return len(steps.prompt) + len(steps.tokens)
        case TextRow():
            return len(renderer.tokenizer.encode(row.text))
        case ConversationRow():
            branches = render_conversation(row, renderer)
            return max(len(branch.rendered.tokens) for branch in branches)
        case _:
            raise AssertionError("a prompt teaches nothing")


def is_surely_longer(row: AnyRow, renderer: Renderer, limit: int) -> bool:
    """Whether a row has more tokens than `limit`, as far as its length in characters tells.

    Example:
        >>> from luyen.data.tokenizer import load_tokenizer
        >>> shown = Renderer(load_tokenizer("builtin://arithmetic"))
        >>> is_surely_longer(TextRow(text="1" * 10**6), shown, 100)
        True
    """
    match row:
        case TextRow():
            least = renderer.tokenizer.least_tokens(row.text)
        case PreferenceRow():
            least = max(
                _least((*row.prompt, *said), renderer) for said in (row.chosen, row.rejected)
            )
        case LabelledRow():
            least = _least((*row.prompt, *row.completion), renderer)
        case SteppedRow():
            said = {"role": "assistant", "content": "".join(row.steps)}
            least = _least((*row.prompt, said), renderer)
        case ConversationRow():
            spoken = [i for i, m in enumerate(row.messages) if m["role"] == "assistant"]
            least = _least(row.messages[: spoken[-1] + 1], renderer) if spoken else 0
        case _:
            raise AssertionError("a prompt teaches nothing")
    return least > _SLACK * limit


def _least(messages: Sequence[Message], renderer: Renderer) -> int:
    """Below the tokens of the conversation; 0, unread, where it is not even long as text."""
    is_long = sum(len(str(message.get("content"))) for message in messages) > _SHORT
    return renderer.least_tokens(messages) if is_long else 0


def teaches_nothing(row: AnyRow, renderer: Renderer) -> bool:
    """Whether no token of a row could be learned from: nothing is said, weighted or labelled.

    Example:
        >>> from luyen.data.tokenizer import load_tokenizer
        >>> shown = Renderer(load_tokenizer("builtin://arithmetic"))
        >>> teaches_nothing(TextRow(text=""), shown), teaches_nothing(TextRow(text="1+1"), shown)
        (True, False)
    """
    match row:
        case TextRow():
            return not renderer.tokenizer.encode(row.text)
        case ConversationRow():
            return not row.learned
        case SteppedRow():
            return all(label is None for label in row.labels)
        case _:
            return False


R = TypeVar("R", bound=AnyRow)
_DIGEST = 16


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineData(Generic[R]):
    """Rows of one kind, and the same rows as prompts, by which they are sampled and listed.

    Example:
        >>> from luyen.data.tokenizer import load_tokenizer
        >>> found = build_offline_data(DataConfig(train_files=("arithmetic://sum?size=8&traces=1",)),
        ...     kinds=(Kind.CONVERSATION,), tokenizer=load_tokenizer("builtin://arithmetic"))
        >>> [len(found.train[i].messages) for i in found.given.sampler.take(0, 2)]
        [2, 2]
    """

    train: Sequence[R]
    """What is learned from: a tuple, or beyond some size on disk."""
    validation: Sequence[R]
    """What is measured on; empty when no files are named."""
    given: TrainData
    """The rows as prompts in the same order, with their sampler, counts and renderer."""


def build_offline_data(
    data: DataConfig,
    *,
    kinds: Sequence[Kind],
    tokenizer: Tokenizer,
    seed: int = 0,
    columns: Sequence[str] = (),
) -> OfflineData[Any]:
    """Every row of the files in the formats that they have; a UserError for rows of other kinds.

    Training rows that repeat an earlier one, pairs of equal answers and rows without anything to
    learn are dropped and counted, and so is everywhere what does not fit into
    `max_prompt_length + max_response_length` tokens. Rows that differ in one of `columns` are not
    the same.
    """
    renderer = Renderer(tokenizer, template_kwargs=data.apply_chat_template_kwargs)
    load = partial(_load, data, kinds=kinds, renderer=renderer, columns=columns)
    with about("data.train_files", FILE):
        rows, train = load(
            data.train_files, data.train_max_samples, "train", data.train_file_samples
        )
    val_rows: tuple[Sequence[Any], Dataset | None] = ((), None)
    if data.val_files:
        with about("data.val_files", FILE):
            val_rows = load(data.val_files, data.val_max_samples, "val")
    validation = val_rows[1]
    given = TrainData(
        train=train,
        validation=validation,
        sampler=build_sampler(data, train, seed=seed),
        renderer=renderer,
        num_leaked=num_leaked(train, validation),
        names=prompt_names(data, train),
    )
    return OfflineData(train=rows, validation=val_rows[0], given=given)


def _load(
    data: DataConfig,
    files: Sequence[str],
    most: int,
    of: str,
    most_of: Sequence[int] = (),
    *,
    kinds: Sequence[Kind],
    renderer: Renderer,
    columns: Sequence[str],
) -> tuple[Sequence[Any], Dataset]:
    rows, prompts, origins = RowWriter[Any](), RowWriter[Prompt](), Origins()
    sources, places, counts = list[RowSource](), list[int](), dict[str, int]()
    options = PromptOptions(frame=frame_of(data))
    for place, address in enumerate(files):
        reading = open_rows(address, string_prompts=data.string_prompts, prompts=options)
        _require_kind(address, reading.format.kind, kinds)
        digest, first = hashlib.blake2b(digest_size=_DIGEST), len(rows)
        wanted = rows_wanted(most, most_of, place, have=first)
        for at, given, size in _first_of(reading, wanted, digest.update):
            row = as_conversation(given) if isinstance(given, Prompt) else given
            rows.append(row, num_bytes=size)
            prompts.append(as_prompt(row, data.reward_fn_key, columns), num_bytes=size)
            origins.append(at.file, at.number)
            places.append(place)
        if not (read := reading.counts["read"]):
            raise UserError(FILE, address, "there are no rows in it", "add rows")
        sources.append(RowSource(address=address, rows=read, fingerprint=digest.hexdigest()))
        counts["read"] = counts.get("read", 0) + len(rows) - first
    stored = prompts.rows()
    dataset = Dataset(
        prompts=stored,
        origins=stored_like(origins, stored),
        sources=tuple(sources),
        fingerprint=_fingerprint(sources),
        counts=counts,
        files=tuple(places),
    )
    check_tools_are_rendered(dataset, renderer)
    return _filtered(data, rows.rows(), dataset, renderer, of)


def _first_of(
    reading: RowReader[Any], wanted: float, hashed: Callable[[bytes], None]
) -> Iterator[tuple[RowAt, Any, int]]:
    """The first `wanted` rows of a file and their bytes; all of its rows are read and hashed."""
    for number, (at, row) in enumerate(reading):
        text = json.dumps(asdict(row), sort_keys=True, default=str).encode()
        hashed(text)
        if number < wanted:
            yield at, row, len(text)


def _fingerprint(sources: Sequence[RowSource]) -> str:
    together = "".join(source.fingerprint for source in sources)
    return hashlib.blake2b(together.encode(), digest_size=_DIGEST).hexdigest()


def _more_room(dropped: Mapping[str, int], limit: int) -> str:
    """What to change where no row is left."""
    if {"overlong", "far too long"} & dropped.keys():
        return f"raise data.max_response_length or data.max_prompt_length: both make {limit}"
    return "give rows that teach something"


def _filtered(
    data: DataConfig, rows: Sequence[Any], dataset: Dataset, renderer: Renderer, of: str
) -> tuple[Sequence[Any], Dataset]:
    limit = data.max_prompt_length + data.max_response_length
    seen: set[int] = set()

    def is_repeated(_: Any, prompt: Prompt) -> bool:
        uid = int(prompt.uid, 16)
        known = uid in seen
        seen.add(uid)
        return known and of == "train" and data.filter_duplicates

    reasons: dict[str, Callable[[Any, Prompt], bool]] = {
        "far too long": lambda row, _: is_surely_longer(row, renderer, limit),
        "without anything to learn": lambda row, _: teaches_nothing(row, renderer),
        "ties": lambda row, _: isinstance(row, PreferenceRow) and row.is_tie,
        "duplicates": is_repeated,
        "overlong": lambda row, _: longest(row, renderer) > limit,
    }
    kept, dropped = array("Q"), dict[str, int]()
    for place, (row, prompt) in enumerate(zip(rows, dataset.prompts, strict=True)):
        why = next((name for name, holds in reasons.items() if holds(row, prompt)), None)
        if why is None:
            kept.append(place)
        else:
            dropped[why] = dropped.get(why, 0) + 1
    dataset = replace(
        dataset,
        prompts=selected(dataset.prompts, kept),
        origins=selected(dataset.origins, kept),
        files=tuple(dataset.files[i] for i in kept),
        counts={**dataset.counts, **dropped},
    )
    if not kept:
        said = ", ".join(f"{n} {what}" for what, n in dataset.counts.items())
        files = [source.address for source in dataset.sources]
        fix = _more_room(dropped, limit)
        raise UserError(f"data.{of}_files", files, f"no row is left: {said}", fix)
    markers = find_markers(dataset.prompts, dataset.origins, renderer.tokenizer.special_tokens)
    return selected(rows, kept), replace(dataset, markers=markers)


def _require_kind(address: str, found: Kind, wanted: Sequence[Kind]) -> None:
    if found not in wanted:
        forms = [", ".join(form.needs) for form in FORMS.values() if form.kind in wanted]
        why = f"its rows are of the kind `{found}`, which this stage cannot learn from"
        fix = f"give rows with the columns {' or '.join(forms)}; see `luyen data inspect`"
        raise UserError(FILE, address, why, fix)


def as_conversation(prompt: Prompt) -> ConversationRow:
    """A row under `prompt` that holds a whole conversation; all that the assistant says counts.

    Example:
        >>> row = make_prompt([{"role": "user", "content": "1+1="},
        ...                    {"role": "assistant", "content": "2"}])
        >>> as_conversation(row).weights
        (0.0, 1.0)
    """
    speaks = [message["role"] == "assistant" for message in prompt.messages]
    if not any(speaks):
        roles = [message["role"] for message in prompt.messages]
        why = "supervised training needs a message of the assistant to learn from"
        raise UserError("messages", roles, why, "add the answer, or drop the row")
    return ConversationRow(
        messages=prompt.messages,
        weights=tuple(map(float, speaks)),
        tools=prompt.tools,
        extra_info={**prompt.extra_info, "data_source": prompt.data_source},
    )


def as_prompt(row: AnyRow, source_key: str, columns: Sequence[str] = ()) -> Prompt:
    """The row as what it asks, with a uid that all that is learned from it counts in."""
    assert not isinstance(row, Prompt)
    messages, rest = _split(row)
    source = row.extra_info.get(source_key, "")
    more = [row.extra_info[name] for name in columns if name in row.extra_info]
    if not isinstance(row, TextRow) and row.template_kwargs:
        more.append(dict(row.template_kwargs))
    rest = [rest, more] if more else rest
    return make_prompt(
        messages,
        tools=() if isinstance(row, TextRow) else row.tools,
        data_source=source if isinstance(source, str) else "",
        ground_truth=rest,
        extra_info=row.extra_info,
    )


def _split(row: AnyRow) -> tuple[Sequence[Any], Any]:
    """What a row asks, and what it teaches."""
    match row:
        case PreferenceRow():
            return row.prompt, [list(row.chosen), list(row.rejected), row.margin]
        case LabelledRow():
            return row.prompt, [list(row.completion), row.label]
        case SteppedRow():
            return row.prompt, [list(row.steps), list(row.labels)]
        case TextRow():
            return ({"role": "user", "content": row.text},), None
        case _:
            spoken = cast(ConversationRow, row)
            return spoken.messages, list(spoken.weights)
