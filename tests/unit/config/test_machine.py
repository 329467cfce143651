"""What a machine's cores can do, from what Linux says of them."""

from pathlib import Path

import pytest

from luyen.config import machine


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("processor : 0\nflags : fpu avx512f avx512_bf16\n", True),
        ("processor : 0\nflags : fpu avx2 avx512f\n", False),
        ("processor : 0\nFeatures : fp asimd bf16\n", True),
        ("processor : 0\nFeatures : fp asimd\n", False),
        ("processor : 0\n", True),
    ],
)
def test_cores_that_multiply_bf16_are_known_by_their_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, has: bool
):
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    assert machine.this_machine().has_bf16 == has
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "none")
    assert machine.this_machine().has_bf16
