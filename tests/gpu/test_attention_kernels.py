"""The attention kernels are right, and give a query the same bits wherever it is computed."""

from itertools import cycle, islice, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.attention_cases import KINDS, TOLERANCE, Case, dense, make_case

pytestmark = pytest.mark.gpu

SHAPES = [(1, 1, 64), (6, 2, 16), (8, 1, 64), (9, 3, 64), (4, 4, 128), (4, 2, 96), (16, 2, 32)]


def problems(shapes: list[tuple[int, int, int]]) -> list[tuple[tuple[int, int, int], str]]:
    """Every shape with every kind; the interpreter is slow and takes each of them about once."""
    if torch.cuda.is_available():
        return list(product(shapes, KINDS))
    count = max(len(shapes), len(KINDS))
    return list(islice(zip(cycle(shapes), cycle(KINDS), strict=False), count))


@pytest.fixture
def kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The kernels; memory that they ask for is full of NaN."""
    from luyen.models.cuda import decode, varlen, varlen_gradients, varlen_segments

    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        found = empty(*args, **kwargs)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    monkeypatch.setattr(torch, "empty", poisoned)
    return SimpleNamespace(
        device=device, is_cuda=device == "cuda", Segments=varlen_segments.Segments,
        blockwise=varlen_gradients.blockwise_gradients, paged_decode=decode.paged_decode,
        store=decode.store_keys_values, forward=varlen.varlen_forward,
        prefill=varlen.paged_prefill, attention=varlen.varlen_attention,
        flash=varlen.flash_varlen,
    )  # fmt: skip


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected.double(), rtol=limit, atol=limit)


def decoded(kernels: SimpleNamespace, case: Case, *, is_split: bool, **launch: int) -> Tensor:
    """Every packed token, as if it were the newest of its row."""
    tables, lengths = case.every_position()
    return kernels.paged_decode(
        case.query, case.keys, case.values, tables, lengths, case.scale,
        is_split=is_split, **case.window, **launch,
    )  # fmt: skip


def last_tokens(case: Case) -> tuple[Tensor, Tensor]:
    """The newest query of each sequence, and the lengths."""
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=case.query.device)
    newest = torch.tensor(case.ends(), device=case.query.device) - 1
    return case.query[newest], lengths


def packed_output(kernels: SimpleNamespace, case: Case, **launch: int) -> Tensor:
    varlen_segments = kernels.Segments.packed(case.lengths, device=kernels.device)
    return kernels.forward(*case.packed(), varlen_segments, case.scale, **case.window, **launch)[0]


@pytest.mark.parametrize(("shape", "kind"), problems(SHAPES), ids=str)
@pytest.mark.parametrize("is_split", [False, True])
def test_decode_is_attention(kernels, shape, kind, is_split):
    lengths = [1, 63, 64, 513, 1030, 8192] if kernels.is_cuda else [1, 65, 300]
    case = make_case(kernels.device, lengths, shape, kind)
    query, counts = last_tokens(case)
    counts = torch.cat([counts, counts.new_zeros(1)])
    tables = torch.cat([case.tables, torch.full_like(case.tables[:1], 2_000_000_000)])
    out = kernels.paged_decode(
        torch.cat([query, query[:1]]), case.keys, case.values, tables, counts, case.scale,
        is_split=is_split, **case.window,
    )  # fmt: skip
    assert_close(out[:-1], case.expected(is_newest=True), case.query.dtype)
    assert torch.equal(out[-1], torch.zeros_like(out[-1]))


@pytest.mark.parametrize(("shape", "kind"), problems(SHAPES), ids=str)
def test_packed_and_paged_prefill_are_attention(kernels, shape, kind):
    lengths = [1, 64, 700, 1, 2048] if kernels.is_cuda else [1, 70, 80]
    case = make_case(kernels.device, lengths, shape, kind)
    varlen_segments = kernels.Segments.packed(lengths, device=kernels.device)
    out, lse = kernels.forward(*case.packed(), varlen_segments, case.scale, **case.window)
    assert_close(out, case.expected(), case.query.dtype)
    assert lse.shape == (shape[0], sum(lengths))
    assert lse.isfinite().all()
    paged = kernels.prefill(
        case.query, case.keys, case.values, case.tables, varlen_segments, case.scale, **case.window
    )
    assert torch.equal(paged, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_number_format_is_right(kernels, dtype):
    if dtype == torch.bfloat16 and not kernels.is_cuda:
        pytest.skip("the interpreter has no bf16 products")
    case = make_case(kernels.device, [3, 70], (2, 1, 64), "all", dtype)
    out = packed_output(kernels, case)
    assert_close(out, case.expected(), dtype)
    assert torch.equal(out, decoded(kernels, case, is_split=False))


def test_stored_keys_are_found_again_and_negative_slots_are_passed_over(kernels):
    case = make_case(kernels.device, [70, 5], (6, 3, 24), "plain")
    keys, values = torch.zeros_like(case.keys), torch.zeros_like(case.values)
    slots = case.slots.clone()
    slots[3] = -1
    strided = case.value.transpose(0, 1).contiguous().transpose(0, 1)
    kernels.store(case.key, strided, keys, values, slots)
    kept = torch.arange(75, device=kernels.device) != 3
    for cache, new in ((keys, case.key), (values, case.value)):
        flat = cache.transpose(1, 2).flatten(0, 1)
        assert torch.equal(flat[case.slots[kept]], new[kept])
        assert flat.count_nonzero() == new[kept].count_nonzero()


@pytest.mark.parametrize("kind", KINDS)
def test_splits_beside_each_other_give_the_same_bits(kernels, kind):
    lengths = [600, 40, 2000, 511, 512, 513, 8000] if kernels.is_cuda else [40, 1030]
    case = make_case(kernels.device, lengths, (6, 2, 64), kind)
    query, counts = last_tokens(case)
    whole, split = (
        kernels.paged_decode(
            query, case.keys, case.values, case.tables, counts, case.scale,
            is_split=is_split, **case.window,
        )
        for is_split in (False, True)
    )  # fmt: skip
    assert torch.equal(whole, split)


@pytest.mark.parametrize(("shape", "kind"), problems([(6, 2, 64), (2, 1, 96)]), ids=str)
def test_decoding_gives_the_bits_of_the_packed_pass(kernels, shape, kind):
    lengths = [1, 700, 64, 1500] if kernels.is_cuda else [66]
    case = make_case(kernels.device, lengths, shape, kind)
    packed = packed_output(kernels, case)
    for is_split in (False, True):
        assert torch.equal(decoded(kernels, case, is_split=is_split), packed)


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_in_chunks_gives_the_bits_of_the_packed_pass(kernels, kind):
    length = 1300 if kernels.is_cuda else 140
    case = make_case(kernels.device, [length], (6, 2, 64), kind)
    packed = packed_output(kernels, case)
    start = 0
    for size in (1, 37, 64, length - 102):
        varlen_segments = kernels.Segments.packed([size], [start + size], device=kernels.device)
        part = kernels.prefill(
            case.query[start : start + size], case.keys, case.values, case.tables, varlen_segments,
            case.scale, **case.window,
        )  # fmt: skip
        assert torch.equal(part, packed[start : start + size])
        start += size
    assert start == length


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_by_a_list_of_tiles_gives_the_bits_of_the_packed_pass(kernels, kind):
    lengths = [1300, 64, 5, 257] if kernels.is_cuda else [140, 3]
    case = make_case(kernels.device, lengths, (6, 2, 64), kind)
    varlen_segments = kernels.Segments.packed(lengths, device=kernels.device)
    tiles = [(row, first) for row, n in enumerate(lengths) for first in range(0, n, 64)]
    # In another order, and with programs that have nothing to do.
    listed = torch.tensor([*tiles[::-1], (0, 1 << 30), (1, 1 << 30)], dtype=torch.int32)
    paged = kernels.prefill(
        case.query, case.keys, case.values, case.tables, varlen_segments, case.scale,
        tiles=listed.to(kernels.device), **case.window,
    )  # fmt: skip
    assert torch.equal(paged, packed_output(kernels, case))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_does_not_notice_its_batch(kernels, kind):
    lengths = [900, 3, 65] if kernels.is_cuda else [66, 3]
    case = make_case(kernels.device, lengths, (4, 2, 32), kind)
    together = packed_output(kernels, case)
    query, counts = last_tokens(case)
    rows = decoded(kernels, case, is_split=False)
    for row, (length, end) in enumerate(zip(lengths, case.ends(), strict=True)):
        varlen_segments = kernels.Segments.packed([length], device=kernels.device)
        own = [x[end - length : end] for x in case.packed()]
        alone = kernels.forward(*own, varlen_segments, case.scale, **case.window)[0]
        assert torch.equal(alone, together[end - length : end])
        single = kernels.paged_decode(
            query[row : row + 1], case.keys, case.values, case.tables[row : row + 1],
            counts[row : row + 1], case.scale, is_split=False, **case.window,
        )  # fmt: skip
        assert torch.equal(single[0], rows[end - 1])


@pytest.mark.parametrize(("tile", "warps"), [(16, 1), (16, 4), (32, 2), (64, 2), (128, 4)])
def test_the_size_of_a_tile_changes_no_bit(kernels, tile, warps):
    length = 1100 if kernels.is_cuda else 140
    case = make_case(kernels.device, [length], (2, 1, 64), "plain")
    assert torch.equal(
        packed_output(kernels, case, tile=tile, warps=warps), packed_output(kernels, case)
    )


@pytest.mark.parametrize("warps", [1, 2, 4, 8])
def test_the_warps_of_decoding_change_no_bit(kernels, warps):
    case = make_case(kernels.device, [600 if kernels.is_cuda else 20], (6, 2, 64), "plain")
    packed = packed_output(kernels, case)
    assert torch.equal(decoded(kernels, case, is_split=False, warps=warps), packed)


def wanted_gradients(case: Case, pairs: list[tuple[slice, slice]], grad: Tensor) -> list[Tensor]:
    """Of query, key, value and sinks, by autograd in float64."""
    window = dict(case.window)
    leaves = [x.double().requires_grad_() for x in case.packed()]
    if "sinks" in window:
        window["sinks"] = window["sinks"].double().requires_grad_()
        leaves.append(window["sinks"])
    q, k, v = leaves[:3]
    outs = [dense(q[a], k[b], v[b], case.scale, **window) for a, b in pairs]
    torch.cat(outs).backward(grad.double())
    return [x.grad for x in leaves if x.grad is not None]


@pytest.mark.parametrize(
    ("shape", "kind"), problems([(4, 2, 32), (9, 3, 64), (2, 2, 128)]), ids=str
)
@pytest.mark.parametrize("kept", [(140, 33, 66), (40, 33, 0)], ids=str)
def test_gradients_are_those_of_float64(kernels, shape, kind, kept):
    case = make_case(kernels.device, [140, 33, 66], shape, kind)
    ends = case.ends()
    pairs = [
        (slice(e - q, e), slice(e - n, e))
        for q, n, e in zip(kept, case.lengths, ends, strict=True)
        if q
    ]
    chosen = torch.cat([torch.arange(a.start, a.stop) for a, _ in pairs]).to(kernels.device)
    grad = torch.randn(len(chosen), *case.query.shape[1:]).to(case.query)
    wanted = wanted_gradients(case, pairs, grad)
    window = dict(case.window)
    leaves = [x.detach().clone().requires_grad_() for x in case.packed()]
    if "sinks" in window:
        window["sinks"] = window["sinks"].clone().requires_grad_()
        leaves.append(window["sinks"])
    varlen_segments = kernels.Segments.packed(kept, case.lengths, device=kernels.device)
    out = kernels.attention(leaves[0][chosen], *leaves[1:3], varlen_segments, case.scale, **window)
    out.backward(grad)
    for leaf, right in zip(leaves, wanted, strict=True):
        largest = right.abs().max()
        assert_close(leaf.grad / largest, right / largest, case.query.dtype)


def test_segments_may_share_keys(kernels):
    case = make_case(kernels.device, [100], (4, 2, 32), "plain")
    numbers = torch.tensor([[0, 40], [0, 0], [40, 60], [100, 100]], dtype=torch.int32)
    starts, firsts, queries, keys = numbers.to(kernels.device)
    varlen_segments = kernels.Segments(
        query_starts=starts, key_starts=firsts, query_lengths=queries, key_lengths=keys,
        max_query=60, max_key=100,
    )  # fmt: skip
    leaves = [x.clone().requires_grad_() for x in case.packed()]
    out = kernels.attention(*leaves, varlen_segments, case.scale)
    pairs = [(slice(0, 40), slice(0, 100)), (slice(40, 100), slice(0, 100))]
    whole = [dense(*(x[s].double() for x, s in zip(case.packed(), (a, b, b), strict=True)),
                   case.scale) for a, b in pairs]  # fmt: skip
    assert_close(out, torch.cat(whole), case.query.dtype)
    grad = torch.randn_like(out)
    out.backward(grad)
    for leaf, right in zip(leaves, wanted_gradients(case, pairs, grad), strict=True):
        assert leaf.grad is not None
        largest = right.abs().max()
        assert_close(leaf.grad / largest, right / largest, case.query.dtype)
