"""Values that leave the sandbox: what is plain arrives as it was, and nothing else arrives."""

import collections
import enum
import json
import math
import struct
from contextlib import suppress
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luyen.sandbox.child import program

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(),
    st.complex_numbers(allow_nan=False), st.fractions(),
    st.decimals(min_value=-(10**50), max_value=10**50),
)  # fmt: skip
hashable = st.recursive(scalars, lambda inner: st.tuples(inner, inner), max_leaves=5)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.sets(hashable, max_size=4),
        st.dictionaries(hashable, inner, max_size=4),
    ),
    max_leaves=20,
)


@given(values)
def test_plain_data_arrives_as_it_was(value):
    found = program.read_plain(program.write_plain(value, most=10**6))
    assert found == value
    assert type(found) is type(value)


@given(st.floats())
def test_every_float_arrives_bit_by_bit(value):
    found = program.read_plain(program.write_plain(value, most=1000))
    assert struct.pack("d", found) == struct.pack("d", value) or math.isnan(value)


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda t: t.encode(errors="replace")))
def test_whatever_a_program_sends_is_plain_data_or_refused(sent):
    with suppress(program.NotPlain):
        program.read_plain(sent.decode(errors="replace"))


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["int", "set", "dict", "tuple", "bytes", "complex", "fraction",
                             "decimal", "object", "long", "other"]), inner, max_size=2),
        max_leaves=10,
    )
)  # fmt: skip
def test_whatever_json_a_program_sends_is_plain_data_or_refused(sent):
    with suppress(program.NotPlain):
        program.read_plain(json.dumps(sent))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[" * 100_000, "RecursionError"),
        ('{"tuple": [' * 100_000, "RecursionError"),
        ('{"fraction": [1, 0]}', "ZeroDivisionError"),
        ('{"decimal": "1e999999999"}', "beyond all bounds"),
        ('{"set": [[1]]}', "TypeError"),
        ('{"int": "0x", "set": []}', "ValueError"),
        ('{"system": "ls"}', "KeyError"),
        ("", "JSONDecodeError"),
        ('{"object": "a Stack"}', "a Stack"),
        ('{"long": 5000000}', "5000000 characters"),
    ],
)
def test_what_is_no_plain_data_is_named(line, why):
    with pytest.raises(program.NotPlain, match=why):
        program.read_plain(line)


def test_subclasses_and_numbers_of_libraries_become_plain():
    class Colour(enum.IntEnum):
        RED = 1

    class Word(str):
        def __str__(self):
            return "another"

    point = collections.namedtuple("point", "x y")
    given_values = [Colour.RED, Word("it"), point(1, 2), collections.Counter("aa"), np.int64(3),
                    np.bool_(True), np.float64(0.5), {1: 2}.keys(), bytearray(b"x")]  # fmt: skip
    wanted = [1, "it", (1, 2), {"a": 2}, 3, True, 0.5, {1}, b"x"]
    found = program.read_plain(program.write_plain(given_values, most=10**4))
    assert found == wanted
    assert [type(one) for one in found] == [type(one) for one in wanted]


def test_data_that_is_too_long_or_too_deep_is_named_inside():
    deep: list = []
    for _ in range(200):
        deep = [deep]
    for value in (deep, "x" * 1000, object(), np.arange(3)):
        with pytest.raises(program.NotPlain):
            program.read_plain(program.write_plain(value, most=500))
    assert program.read_plain(program.write_plain(Decimal("1.50"), most=500)) == Decimal("1.5")
