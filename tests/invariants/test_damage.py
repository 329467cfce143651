"""One file of a run is truncated, changed or gone: whoever reads it says so, or is not misled."""

from collections.abc import Iterator

import pytest

from tests.fuzz.damage import Damage, all_damages, quick_damages
from tests.fuzz.readers import READERS, Benches, judge

QUICK = quick_damages()
REST = [damage for damage in all_damages() if damage not in QUICK]


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Benches]:
    with Benches(tmp_path_factory.mktemp("damaged")) as found:
        yield found


@pytest.mark.parametrize("damage", QUICK, ids=str)
def test_damage_is_told_or_changes_nothing(damage: Damage, benches: Benches):
    readers = READERS[damage.kind]
    reader = readers[QUICK.index(damage) % 2 % len(readers)]
    judge(benches.of(damage.shape), damage, reader)


@pytest.mark.slow
@pytest.mark.parametrize("damage", REST, ids=str)
def test_every_reader_of_every_file(damage: Damage, benches: Benches):
    for reader in READERS[damage.kind]:
        judge(benches.of(damage.shape), damage, reader)


def test_there_are_two_hundred_of_them():
    assert len(all_damages()) == len(set(map(str, all_damages()))) == 200
