"""The file of numbers per token that a replay of a step measured, as the studio shows them.

It lies outside of the run, which a replay does not change. A row holds a hash of the tokens it is
about, so that numbers of another course of the run are never shown.
"""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

import pyarrow as pa
import pyarrow.parquet as pq

from luyen.base.files import write_whole, writing
from luyen.base.input_files import read_bytes

Numbers: TypeAlias = tuple[float | None, ...]
_MOST_BYTES = 2**28
_IS_EQUAL = b"luyen.replay.equal"
_COLUMNS = pa.schema(
    [
        ("group", pa.string()),
        ("sample", pa.int64()),
        ("digest", pa.string()),
        ("trainer_logps", pa.list_(pa.float64())),
        ("entropy", pa.list_(pa.float64())),
    ]
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenNumbers:
    """Numbers of the tokens of one rollout under the weights before its step.

    Example:
        >>> TokenNumbers(group="1.0.ab", sample=0, tokens=(5,), trainer_logps=(-0.5,),
        ...              entropy=(0.7,)).entropy
        (0.7,)
    """

    group: str
    """Its group."""
    sample: int
    """Which of the group."""
    tokens: tuple[int, ...]
    """Its tokens."""
    trainer_logps: Numbers
    """Log-probability of each token; None where it does not train."""
    entropy: Numbers
    """Entropy of the distribution of each token, in nats; None where it does not train."""


def write_token_numbers(path: Path, rows: Sequence[TokenNumbers], *, is_equal: bool) -> None:
    """Write the numbers of a step; `is_equal` says whether the replay came out as recorded."""
    table = pa.Table.from_pylist(
        [
            {
                "group": row.group,
                "sample": row.sample,
                "digest": _digest(row.tokens),
                "trainer_logps": row.trainer_logps,
                "entropy": row.entropy,
            }
            for row in rows
        ],
        schema=_COLUMNS.with_metadata({_IS_EQUAL: b"1" if is_equal else b"0"}),
    )
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, buffer.getvalue())


def read_token_numbers(
    path: Path, *, group: str, sample: int, tokens: Sequence[int]
) -> tuple[TokenNumbers, bool] | None:
    """The numbers of a rollout, and whether the replay came out as recorded.

    None where there is no such file, it is damaged, or it is about other tokens.
    """
    try:
        table = pq.read_table(io.BytesIO(read_bytes(path, most_bytes=_MOST_BYTES)))
        places = zip(table["group"].to_pylist(), table["sample"].to_pylist(), strict=True)
        number = list(places).index((group, sample))
        [row] = table.slice(number, 1).to_pylist()
        found = TokenNumbers(
            group=group,
            sample=sample,
            tokens=tuple(tokens),
            trainer_logps=_numbers(row["trainer_logps"], len(tokens)),
            entropy=_numbers(row["entropy"], len(tokens)),
        )
        is_equal = (table.schema.metadata or {}).get(_IS_EQUAL) == b"1"
        return (found, is_equal) if row["digest"] == _digest(tokens) else None
    except (OSError, ValueError, LookupError, TypeError, pa.ArrowException):
        return None


def _numbers(values: Any, count: int) -> Numbers:
    if len(values) != count:
        raise ValueError(f"{len(values)} numbers for {count} tokens")
    return tuple(values)


def _digest(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(repr(tuple(tokens)).encode(), digest_size=16).hexdigest()
