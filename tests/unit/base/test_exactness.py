"""Padding and the promise follow the branch that MKL was asked for."""

import pytest

from luyen.base import exactness


def test_a_users_own_setting_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    exactness.prepare_process()
    assert exactness.instruction_set_in_force() == "AVX2"
    assert not exactness.is_promised("float32")


def test_strict_is_asked_for_where_nothing_was(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MKL_CBWR")
    exactness.prepare_process()
    assert exactness.instruction_set_in_force() == exactness.instruction_set()
    assert not exactness.is_promised("bfloat16")


@pytest.mark.parametrize(("vendor", "promised"), [("GenuineIntel", True), ("AuthenticAMD", False)])
def test_only_processors_on_which_mkl_is_strict_are_promised(
    monkeypatch: pytest.MonkeyPatch, vendor: str, promised: bool
):
    monkeypatch.setenv("MKL_CBWR", "AVX512,STRICT")
    monkeypatch.setattr(exactness.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(exactness, "_processor", lambda: f"vendor_id : {vendor}\nflags : avx512f")
    assert exactness.is_promised("float32") is promised


@pytest.mark.parametrize(
    ("branch", "expected"),
    [
        ("AVX512,STRICT", {1: 32, 32: 32, 33: 64, 256: 256, 257: 512, 513: 768, 1025: 1280}),
        ("AVX2,STRICT", {1: 512, 512: 512, 513: 1024}),
    ],
)
def test_lengths_are_padded_by_branch(monkeypatch: pytest.MonkeyPatch, branch: str, expected):
    monkeypatch.setenv("MKL_CBWR", branch)
    assert {n: exactness.padded_length(n) for n in expected} == expected


def test_the_processor_is_read_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MKL_CBWR")
    exactness.padded_length(3)
    monkeypatch.setattr(exactness.Path, "read_text", lambda _: pytest.fail("read again"))
    assert exactness.padded_length(3) >= 3
