"""Random numbers with an address: no two addresses meet, and the numbers look uniform."""

import hashlib
import itertools
import math

from luyen.base.seeds import derive_key, mix, shuffled, uniform


def test_two_hundred_thousand_addresses_do_not_collide():
    places = itertools.product(range(20), range(25), range(10), range(40))
    keys = {derive_key(0, "rollout", a, b, f"u{c}", d) for a, b, c, d in places}
    assert len(keys) == 200_000


def test_parts_of_an_address_cannot_run_into_each_other():
    addresses = [(1, "2"), ("1", 2), ("12",), (12,), (1, 2), ("1", "2"), ("1s1:2",), (1, 2, ""), ()]
    assert len({derive_key(0, "p", *path) for path in addresses}) == len(addresses)
    assert derive_key(0, "a", "b") != derive_key(0, "ab")
    assert derive_key(-1, "a") != derive_key(1, "a")
    assert all(0 <= derive_key(seed, "p") < 1 << 64 for seed in range(100))


def test_a_key_is_the_same_in_every_process():
    text = b"i1:0s7:rollouti1:3s2:a1i1:0"
    expected = int(hashlib.blake2b(text, digest_size=8).hexdigest(), 16)
    assert derive_key(0, "rollout", 3, "a1", 0) == expected == 0xD059A49E4305909F
    # SplitMix64 with seed 0 begins with this number, by its published reference code.
    assert mix(0, 0) == 0xE220A8397B1DCDAF
    assert mix(0, 1) == 0x6E789E6AA1B965F4
    assert uniform(0, 0) == 0xE220A839 / 2**32


def chi_square(counts: list[int], total: int) -> float:
    expected = total / len(counts)
    return sum((count - expected) ** 2 / expected for count in counts)


def limit(cells: int) -> float:
    """Above it less than one in 30,000 fair draws (four standard deviations)."""
    return cells - 1 + 4 * math.sqrt(2 * (cells - 1))


def test_numbers_are_uniform_along_positions_and_along_keys():
    for numbers in (
        [uniform(derive_key(0, "p"), i) for i in range(50_000)],
        [uniform(derive_key(0, "p", i), 0) for i in range(50_000)],
        [uniform(i, 0) for i in range(50_000)],
    ):
        counts = [0] * 100
        for number in numbers:
            counts[int(number * 100)] += 1
        assert chi_square(counts, 50_000) < limit(100)


def test_neighbouring_positions_and_keys_are_independent():
    for pair in (lambda i: (uniform(7, i), uniform(7, i + 1)),
                 lambda i: (uniform(i, 3), uniform(i + 1, 3))):  # fmt: skip
        counts = [0] * 100
        for i in range(0, 100_000, 2):
            first, second = pair(i)
            counts[int(first * 10) * 10 + int(second * 10)] += 1
        assert chi_square(counts, 50_000) < limit(100)


def test_shuffled_is_a_permutation_that_the_key_decides():
    for count in (0, 1, 2, 50):
        assert sorted(shuffled(count, 5)) == list(range(count))
    assert shuffled(50, 5) == shuffled(50, 5)
    assert shuffled(50, 5) != shuffled(50, 6)


def test_every_permutation_is_about_as_frequent():
    orders = list(itertools.permutations(range(4)))
    counts = dict.fromkeys(orders, 0)
    for i in range(24_000):
        counts[tuple(shuffled(4, derive_key(0, "s", i)))] += 1
    assert chi_square(list(counts.values()), 24_000) < limit(24)
