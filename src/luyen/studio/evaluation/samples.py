"""Samples of an evaluation: read and written as files, and as records for statistics."""

import importlib
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.files import json_line, plain, read_lines, write_whole

_UNNAMED = "unnamed"
"""The source of samples whose rows name none."""
NEEDED = ("uid", "data_source", "sample", "answer", "reward", "fault")
"""Columns without which a row cannot be compared."""
_BOXED = re.compile(r"\\boxed\s*\{")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The fields of a rollout that statistics use.

    Example:
        >>> Sample(uid="a", occurrence=0, data_source="sum", question="1+1=", answer="It is 2.",
        ...        reward=1.0, fault=None).vote
        '2'
    """

    uid: str
    """Hash of the prompt."""
    occurrence: int
    """Which of the rows with this prompt it belongs to, counted from 0."""
    data_source: str
    """Where the prompt came from."""
    question: str
    """The last message of the prompt, for display."""
    answer: str
    """The final response of the policy."""
    reward: float | None
    """Its reward; None if it could not be scored."""
    fault: str | None
    """What went wrong, if anything did."""

    @property
    def prompt(self) -> tuple[str, int]:
        """The row that it answers: the same in every file about the same rows."""
        return self.uid, self.occurrence

    @property
    def vote(self) -> str:
        """The final answer for majority voting, see `vote_of`."""
        return vote_of(self.answer)


def vote_of(text: str) -> str:
    r"""The part of an answer that is compared: boxed, tagged, after ####, the last number, or all.

    Example:
        >>> vote_of(r"so \boxed{\frac{1}{2}}."), vote_of("1 + 1 = 2"), vote_of(" Yes ")
        ('\\frac{1}{2}', '2', 'yes')
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        return _flat(boxed)
    if tagged := _TAGGED.findall(text):
        return _flat(tagged[-1])
    if "####" in text:
        return _flat(text.rpartition("####")[2])
    if numbers := _NUMBER.findall(text):
        return str(numbers[-1]).replace(",", "").removeprefix("+")
    return _flat(text)


def _last_boxed(text: str) -> str | None:
    """What stands between the braces of the last closed box."""
    for match in reversed(list(_BOXED.finditer(text))):
        depth = 1
        for place in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[match.end() : place]
    return None


def _flat(text: str) -> str:
    return " ".join(text.split()).casefold()


def samples_of(rows: Iterable[Mapping[str, Any]], *, source: str) -> list[Sample]:
    """The rows as samples; a UserError that names `source` where a row is no sample."""
    found: list[Sample] = []
    seen: dict[tuple[str, str], int] = {}
    for number, row in enumerate(rows, 1):
        lacking = [name for name in NEEDED if name not in row]
        if lacking:
            why = f"row {number} has no `{lacking[0]}`"
            raise UserError("samples", source, why, "give a file of `luyen eval --samples-out`")
        # The same prompt may occur in several rows; its sample numbers then repeat.
        key = (str(row["uid"]), str(row["sample"]))
        occurrence = seen.get(key, 0)
        seen[key] = occurrence + 1
        found.append(_sample(row, occurrence, source=f"{source}, row {number}"))
    if not found:
        fix = "give a file of `luyen eval --samples-out`"
        raise UserError("samples", source, "it holds no row", fix)
    return found


def _sample(row: Mapping[str, Any], occurrence: int, *, source: str) -> Sample:
    reward = row["reward"]
    fault = row["fault"]
    if reward is not None:
        try:
            reward = float(reward)
        except (TypeError, ValueError, OverflowError):
            fix = "a reward is a number, or null with a `fault`"
            raise UserError("reward", reward, f"no number in {source}", fix) from None
        if not math.isfinite(reward):  # never a 0: it is left out and counted
            reward, fault = None, fault or f"reward: {reward}"
    messages = row.get("prompt")
    last: Any = messages[-1] if isinstance(messages, Sequence) and messages else messages
    question = last.get("content") if isinstance(last, Mapping) else last
    return Sample(
        uid=str(row["uid"]),
        occurrence=occurrence,
        data_source=str(row["data_source"] or _UNNAMED),
        question="" if question is None else str(question),
        answer=str(row["answer"]),
        reward=reward,
        fault=None if fault is None else str(fault),
    )


# Sample files: every rollout of an evaluation with its prompt, response and scores.

_NESTED = ("prompt", "messages", "ground_truth", "score", "decoding")
"""Columns that Parquet holds as JSON text: their shape differs from row to row."""


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows whole: JSON lines, or Parquet where the name ends so."""
    if path.suffix == ".parquet":
        _write_parquet(path, rows)
    else:
        write_whole(path, "".join(json_line(row) for row in rows))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that `write_rows` wrote."""
    if not path.is_file():
        fix = "give files that `luyen eval --samples-out` wrote"
        raise UserError("samples", str(path), "no such file", fix)
    return _read_parquet(path) if path.suffix == ".parquet" else read_lines(path)


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    flat = [
        {n: json.dumps(plain(v), ensure_ascii=False) if n in _NESTED else v for n, v in row.items()}
        for row in rows
    ]
    pyarrow: Any = importlib.import_module("pyarrow")  # untyped, and slow to load
    parquet: Any = importlib.import_module("pyarrow.parquet")
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(flat), buffer, compression="zstd")
    write_whole(path, buffer.getvalue())


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    parquet: Any = importlib.import_module("pyarrow.parquet")
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        return [
            {n: json.loads(v) if n in _NESTED and v is not None else v for n, v in row.items()}
            for row in rows
        ]
    except (ValueError, OSError) as error:
        why = f"it is damaged: {error}"
        raise UserError("samples", str(path), why, "write it again") from error
