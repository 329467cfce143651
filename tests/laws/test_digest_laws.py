"""Digests of tensors: what every split keeps, and what every change changes."""

from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from luyen.models import weights
from luyen.models.weights import digest_sum, tensor_digests

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MASK = (1 << 64) - 1


def of_bits(numbers: list[int], dtype: torch.dtype) -> Tensor:
    """A tensor whose elements have these bits, as far as the type has room."""
    if dtype == torch.bool:
        return torch.tensor([n & 1 for n in numbers], dtype=torch.bool)
    size = torch.empty(0, dtype=dtype).element_size()
    data = b"".join((n & (1 << 8 * size) - 1).to_bytes(size, "little") for n in numbers)
    return torch.frombuffer(bytearray(data), dtype=dtype)


def bits_of(tensor: Tensor) -> list[int]:
    flat = tensor.contiguous().view(-1)
    return flat.view(WIDTH[flat.element_size()]).tolist()


def number(tensor: Tensor, offset: int = 0) -> int:
    return int(digest_sum(tensor, offset=offset)) & MASK


tensors = st.builds(
    of_bits,
    st.lists(st.integers(0, MASK), min_size=1, max_size=40),
    st.sampled_from(DTYPES),
)


@given(tensors, st.lists(st.integers(0, 40), max_size=4))
def test_the_digest_of_a_whole_is_the_sum_of_those_of_its_shards(whole: Tensor, cuts: list[int]):
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    total = sum(number(whole[start:end], offset=start) for start, end in pairwise(edges)) & MASK
    assert total == number(whole)


@given(st.integers(1, 7), st.integers(1, 5), st.integers(1, 4), st.sampled_from(DTYPES[:4]))
def test_row_shards_of_a_matrix_add_up_on_any_number_of_ranks(
    rows: int, columns: int, ranks: int, dtype: torch.dtype
):
    whole = torch.arange(rows * columns).sub(3).to(dtype).view(rows, columns)
    each = -(-rows // ranks)
    parts = [
        number(whole[rank * each : (rank + 1) * each], offset=rank * each * columns)
        for rank in range(ranks)
    ]
    assert sum(parts) & MASK == number(whole)


@given(st.sampled_from(DTYPES), st.integers(0, 5))
def test_shards_meet_at_the_end_of_a_row_of_constants(dtype: torch.dtype, before: int):
    whole = of_bits(list(range(3, 15)), dtype)
    start = weights._TABLE - before
    cut = 4
    joined = number(whole[:cut], start) + number(whole[cut:], start + cut)
    assert joined & MASK == number(whole, start)


@given(tensors, st.data())
def test_a_changed_bit_changes_the_digest(tensor: Tensor, data: st.DataObject):
    place = data.draw(st.integers(0, len(tensor) - 1))
    changed = tensor.clone()
    if tensor.dtype == torch.bool:
        changed[place] = ~changed[place]
    else:
        size = tensor.element_size()
        bit = data.draw(st.integers(0, 8 * size - 1))
        words = changed.view(torch.uint8)
        words[place * size + bit // 8] ^= 1 << bit % 8
    assert number(changed) != number(tensor)


@given(tensors, st.data())
def test_two_elements_that_change_places_change_the_digest(tensor: Tensor, data: st.DataObject):
    one, other = (data.draw(st.integers(0, len(tensor) - 1)) for _ in range(2))
    assume(bits_of(tensor)[one] != bits_of(tensor)[other])
    swapped = tensor.clone()
    swapped[one], swapped[other] = tensor[other].clone(), tensor[one].clone()
    assume(bits_of(swapped) != bits_of(tensor))
    assert number(swapped) != number(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bits_count_and_not_values(dtype: torch.dtype):
    assert number(torch.tensor([0.0], dtype=dtype)) != number(torch.tensor([-0.0], dtype=dtype))
    size = torch.empty(0, dtype=dtype).element_size()
    quiet = of_bits([(1 << 8 * size) - 1], dtype)
    other = of_bits([(1 << 8 * size) - 2], dtype)
    assert bool(quiet.isnan())
    assert bool(other.isnan())
    assert number(quiet) != number(other)
    assert number(quiet) == number(quiet.clone())


def test_shape_and_type_are_told_beside_the_digest():
    tensor = torch.arange(6, dtype=torch.int32)
    texts = {
        name: text.rpartition(" ")
        for name, text in tensor_digests(
            {"flat": tensor, "wide": tensor.view(2, 3), "tall": tensor.view(3, 2)}
        ).items()
    }
    assert len({end for _, _, end in texts.values()}) == 1
    assert len({begin for begin, _, _ in texts.values()}) == 3
    zeros = tensor_digests({"f": torch.zeros(2), "i": torch.zeros(2, dtype=torch.int32)})
    assert zeros["f"] != zeros["i"]


def test_a_transposed_matrix_is_read_in_its_own_order():
    matrix = torch.arange(12.0).view(3, 4)
    assert number(matrix.T) == number(matrix.T.contiguous())
    assert number(matrix.T) != number(matrix)
    assert number(matrix[:, ::2]) == number(matrix[:, ::2].contiguous())


def test_a_large_tensor_is_the_sum_over_its_elements():
    size = 2 * weights._TABLE + 77
    tensor = torch.arange(size, dtype=torch.int32) * 7919 - 5
    constants = weights._constants(torch.device("cpu"))
    total = 0
    for start in range(0, size, weights._TABLE):
        words = tensor[start : start + weights._TABLE].long()
        row = start // weights._TABLE
        factor = weights._row_constant(row) if row else 1
        total += factor * int((words * constants[: len(words)]).sum())
    assert number(tensor) == total & MASK


def test_constants_are_odd_and_no_two_are_equal():
    constants = weights._constants(torch.device("cpu"))
    assert bool((constants & 1).all())
    assert len(constants.unique()) == len(constants)
    rows = [weights._row_constant(row) for row in range(1, 10_000)]
    assert all(row & 1 for row in rows)
    assert len(set(rows)) == len(rows)
    assert all(-(1 << 63) <= row < 1 << 63 for row in rows)


def test_an_empty_tensor_has_digest_0():
    assert number(torch.empty(0)) == 0
    assert tensor_digests({}) == {}
