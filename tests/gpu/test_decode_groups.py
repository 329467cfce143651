"""Rows that read common pages together get the attention that each would get alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import pytest
import torch
from torch import Tensor

from luyen.models.attention import AttentionWindow
from luyen.models.paged_attention import Groups, Pages, decode, decode_grouped
from tests.gpu.attention_cases import NOWHERE, TOLERANCE, dense

pytestmark = pytest.mark.gpu

KINDS = ("plain", "softcap", "sinks", "both")
SHAPES = [(9, 3, 64), (6, 2, 16), (1, 1, 64), (4, 2, 96), (16, 1, 32), (4, 4, 128)]
SMALL = [(2, [5, 70]), (0, [33]), (1, [64, 0]), (3, [0, 0]), (5, [1, 130, 9]), (0, [0])]
LARGE = [
    (16, [1, 600, 64, 3, 0, 7, 128, 65]),
    (0, [1500]),
    (70, [40] * 16),
    (3, [0, 0]),
    (1, [2, 9]),
]
Families = Sequence[tuple[int, Sequence[int]]]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """Rows in a poisoned cache, and what is right. Example: `make("cpu", SMALL, ...)`."""

    query: Tensor
    pages: Pages
    tables: Tensor
    lengths: Tensor
    groups: Groups
    scale: float
    window: dict[str, Any]
    expected: Tensor

    def on(self, device: str) -> "Problem":
        """The same there."""
        at = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.window.items()}
        pair, groups = self.pages, self.groups
        return replace(
            self,
            query=self.query.to(device),
            pages=Pages(keys=pair.keys.to(device), values=pair.values.to(device)),
            tables=self.tables.to(device),
            lengths=self.lengths.to(device),
            groups=Groups(members=groups.members.to(device), shared=groups.shared.to(device)),
            window=at,
            expected=self.expected.to(device),
        )

    def solve(self, **launch: Any) -> Tensor:
        """By the kernels."""
        from luyen.models.cuda.decode_groups import grouped_decode

        return grouped_decode(
            self.query, self.pages.keys, self.pages.values, self.tables, self.lengths,
            self.groups.members, self.groups.shared, self.scale, **self.window, **launch,
        )  # fmt: skip


@final
class Cache:
    """Pages that are full of NaN where nothing was written, taken in random order."""

    def __init__(self, pages: int, shape: tuple[int, int], dtype: torch.dtype, draw: Any) -> None:
        """`shape` is key heads and width."""
        self._free = torch.randperm(2 * pages + 1, generator=draw).tolist()
        self._draw = draw
        size = (2, len(self._free), shape[0], 64, shape[1])
        self.held = torch.full(size, torch.nan, dtype=dtype)

    def write(self, keys: int) -> list[int]:
        """Pages with so many random keys."""
        pages = [self._free.pop() for _ in range(-(-keys // 64))]
        for i, page in enumerate(pages):
            part = self.held[:, page, :, : min(64, keys - 64 * i)]
            part.copy_(torch.randn(part.shape, generator=self._draw))
        return pages

    def read(self, pages: list[int], length: int) -> Tensor:
        """Keys and values `[2, length, kv heads, width]`."""
        return self.held[:, pages].transpose(2, 3).flatten(1, 2)[:, :length]


def window_of(kind: str, sinks: Tensor) -> dict[str, Any]:
    """Keyword arguments of the kernels."""
    found: dict[str, Any] = {"softcap": 3.0} if kind in ("softcap", "both") else {}
    return found | ({"sinks": sinks} if kind in ("sinks", "both") else {})


def make(
    device: str,
    families: Families,
    shape: tuple[int, int, int],
    kind: str,
    *,
    width: int = 16,
    dtype: torch.dtype | None = None,
) -> Problem:
    """Families of (common pages, own keys of each row; 0: the row rests), rows in random order."""
    heads, kv_heads, numbers = shape
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    draw = torch.Generator().manual_seed(heads * numbers + width)
    window = window_of(kind, torch.randn(heads, generator=draw).to(dtype))
    rows = sum(len(own) for _, own in families)
    pages = sum(n + sum(-(-o // 64) for o in own) for n, own in families)
    cache = Cache(pages, (kv_heads, numbers), dtype, draw)
    tables = torch.full((rows, pages + 1), NOWHERE, dtype=torch.int32)
    lengths, shared = (torch.zeros(rows, dtype=torch.int32) for _ in range(2))
    members = torch.full((max(1, rows // 2), width), -1, dtype=torch.int32)
    query = torch.randn(rows, heads, numbers, generator=draw).to(dtype)
    expected = torch.zeros(rows, heads, numbers).double()
    order = iter(torch.randperm(rows, generator=draw).tolist())
    for line, (count, own) in enumerate(sorted(families, reverse=True)):
        common = cache.write(64 * count if any(own) else 0)
        for member, (row, extra) in enumerate(zip([next(order) for _ in own], own, strict=True)):
            if count:
                members[line, member], shared[row] = row, 64 * count
            if extra == 0:
                query[row] = torch.nan
                continue
            held = [*common, *cache.write(extra)]
            tables[row, : len(held)] = torch.tensor(held)
            lengths[row] = 64 * count + extra
            pair = cache.read(held, int(lengths[row])).double()
            expected[row] = dense(query[row, None].double(), *pair, numbers**-0.5, **window)[0]
    return Problem(
        query=query, pages=Pages(keys=cache.held[0], values=cache.held[1]), tables=tables,
        lengths=lengths, groups=Groups(members=members, shared=shared), scale=numbers**-0.5,
        window=window, expected=expected,
    ).on(device)  # fmt: skip


@pytest.fixture
def place(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device; memory that kernels ask for is full of NaN."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        found = empty(*args, **kwargs)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    monkeypatch.setattr(torch, "empty", poisoned)
    return device


def families(place: str) -> Families:
    return LARGE if place == "cuda" else SMALL


def assert_right(found: Tensor, problem: Problem) -> None:
    limit = TOLERANCE[problem.query.dtype]
    torch.testing.assert_close(found.double(), problem.expected, rtol=limit, atol=limit)
    resting = problem.lengths == 0
    assert torch.equal(found[resting], torch.zeros_like(found[resting]))


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(
    ("shape", "kind"), list(zip(SHAPES, [*KINDS, *KINDS], strict=False)), ids=str
)
def test_it_is_attention(place, shape, kind, is_split):
    problem = make(place, families(place), shape, kind)
    assert_right(problem.solve(is_split=is_split), problem)


@pytest.mark.parametrize(("lanes", "shared_parts"), [(1, 1), (16, 3), (128, 16), (64, 2)])
def test_however_the_shared_pages_are_cut(place, lanes, shared_parts):
    problem = make(place, families(place), (6, 2, 32), "both")
    from luyen.models.cuda.decode_groups import Launch

    launch = Launch(lanes=lanes, shared_parts=shared_parts)
    found = problem.solve(is_split=False, launch=launch)
    assert_right(found, problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_number_format_is_right(place, dtype):
    if dtype == torch.bfloat16 and place != "cuda":
        pytest.skip("the interpreter has no bf16 products")
    problem = make(place, families(place), (6, 2, 64), "sinks", dtype=dtype)
    for is_split in (False, True):
        assert_right(problem.solve(is_split=is_split), problem)


@pytest.mark.parametrize("kind", KINDS)
def test_it_equals_decoding_row_by_row_within_rounding(place, kind):
    from luyen.models.cuda.decode import paged_decode

    problem = make(place, families(place), (9, 3, 64), kind)
    alone = paged_decode(
        problem.query, problem.pages.keys, problem.pages.values, problem.tables, problem.lengths,
        problem.scale, is_split=False, **problem.window,
    )  # fmt: skip
    limit = TOLERANCE[problem.query.dtype]
    torch.testing.assert_close(problem.solve(is_split=False), alone, rtol=limit, atol=limit)


def test_groups_of_any_size_fit_a_line(place):
    for width, sizes in ((2, [2, 2]), (8, [7, 3]), (64, [33])):
        asked = [(2, [3 + i for i in range(n)]) for n in sizes]
        problem = make(place, asked, (3, 1, 16), "plain", width=width)
        assert_right(problem.solve(is_split=False), problem)


def test_without_groups_it_is_plain_decoding(place):
    problem = make(place, [(0, [70, 0, 3])], (6, 2, 32), "both")
    for is_split in (False, True):
        assert_right(problem.solve(is_split=is_split), problem)


@pytest.mark.parametrize("kind", KINDS)
def test_the_form_without_kernels_is_right(place, kind):
    problem = make("cpu", SMALL, (6, 2, 16), kind, dtype=torch.float32)
    read = problem.query, problem.pages, problem.tables, problem.lengths
    window = AttentionWindow(**problem.window)
    found = decode_grouped(*read, problem.groups, problem.scale, window, is_split=False)
    assert_right(found, problem)


def test_a_layer_with_a_window_reads_row_by_row(place):
    problem = make(place, [(2, [5, 70])], (6, 2, 16), "plain")
    tables = problem.tables.clamp(max=problem.pages.keys.shape[0] - 1)
    clean = Pages(keys=problem.pages.keys.nan_to_num(), values=problem.pages.values.nan_to_num())
    read = problem.query, clean, tables, problem.lengths
    together, alone = (
        decode_grouped(*read, problem.groups, 1.0, AttentionWindow(sliding=40), is_split=False),
        decode(*read, 1.0, AttentionWindow(sliding=40), is_split=False),
    )
    assert torch.equal(together, alone)
