"""Padding and the promise follow the branch that MKL was asked for, and the kind of processor."""

import logging

import pytest

from luyen.base import process_setup

READ = process_setup._processor  # pyright: ignore[reportPrivateUsage]


@pytest.fixture(autouse=True)
def _intel(monkeypatch: pytest.MonkeyPatch):
    on(monkeypatch, "x86_64", processor="vendor_id : GenuineIntel\nflags : avx512f")


def on(
    monkeypatch: pytest.MonkeyPatch, machine: str, *, processor: str, system: str = "Linux"
) -> None:
    """What follows runs on such a machine."""
    monkeypatch.setattr(process_setup.platform, "machine", lambda: machine)
    monkeypatch.setattr(process_setup.platform, "system", lambda: system)
    monkeypatch.setattr(process_setup, "_processor", lambda: processor)


def test_a_users_own_setting_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    process_setup.prepare_process()
    assert process_setup.instruction_set_in_force() == "AVX2"
    assert not process_setup.is_promised("float32")


def test_strict_is_asked_for_where_nothing_was(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MKL_CBWR", raising=False)
    process_setup.prepare_process()
    assert process_setup.instruction_set_in_force() == process_setup.instruction_set()
    assert not process_setup.is_promised("bfloat16")


def test_a_kernel_that_is_not_used_is_not_asked_for():
    """It is asked for on processors with avx512_bf16, by each command that loads peft."""
    asking = pytest.importorskip("bitsandbytes.backends.cpu.ops")
    asking.logger.setLevel(logging.NOTSET)
    process_setup.prepare_process()
    assert not asking.logger.isEnabledFor(logging.WARNING)


@pytest.mark.parametrize(
    ("vendor", "family", "setting", "promised", "rows"),
    [
        ("GenuineIntel", 6, "AVX512,STRICT", True, 1),
        ("GenuineIntel", 6, "AVX512", False, 1),
        ("AuthenticAMD", 25, "AVX512,STRICT", False, 4),
        ("AuthenticAMD", 26, "AVX512,STRICT", True, 4),
        ("AuthenticAMD", 26, "COMPATIBLE", False, 4),
    ],
)
def test_only_processors_that_were_measured_are_promised(
    monkeypatch: pytest.MonkeyPatch,
    vendor: str,
    family: int,
    setting: str,
    promised: bool,
    rows: int,
):
    monkeypatch.setenv("MKL_CBWR", setting)
    said = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nflags\t: avx512f"
    on(monkeypatch, "x86_64", processor=said)
    assert (process_setup.is_promised("float32"), process_setup.least_rows()) == (promised, rows)


@pytest.mark.parametrize(
    ("branch", "expected"),
    [
        ("AVX512,STRICT", {1: 32, 32: 32, 33: 64, 256: 256, 257: 512, 513: 768, 1025: 1280}),
        ("AVX2,STRICT", {1: 512, 512: 512, 513: 1024}),
    ],
)
def test_lengths_are_padded_by_branch(monkeypatch: pytest.MonkeyPatch, branch: str, expected):
    monkeypatch.setenv("MKL_CBWR", branch)
    assert {n: process_setup.padded_length(n) for n in expected} == expected


def test_lengths_are_padded_as_amd_needs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MKL_CBWR", "AVX512,STRICT")
    on(monkeypatch, "x86_64", processor="vendor_id\t: AuthenticAMD\nflags\t: avx512f")
    expected = {1: 32, 97: 128, 128: 128, 129: 512, 513: 1024}
    assert {n: process_setup.padded_length(n) for n in expected} == expected


@pytest.mark.parametrize(
    ("machine", "system", "features", "promised"),
    [
        ("aarch64", "Linux", "fp asimd", True),
        ("aarch64", "Linux", "fp asimd sve", False),
        ("arm64", "Darwin", "", False),
    ],
)
def test_arm_has_no_mkl_and_is_promised_where_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, machine: str, system: str, features: str, promised: bool
):
    monkeypatch.delenv("MKL_CBWR", raising=False)
    on(monkeypatch, machine, processor=f"Features : {features}", system=system)
    process_setup.prepare_process()
    assert "MKL_CBWR" not in process_setup.os.environ
    assert process_setup.instruction_set_in_force() == "NEON"
    assert process_setup.is_promised("float32") is promised
    assert not process_setup.is_promised("bfloat16")
    assert [process_setup.padded_length(n) for n in (5, 257)] == [32, 512]


def test_a_setting_of_mkl_says_nothing_on_arm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    on(monkeypatch, "aarch64", processor="Features : fp asimd")
    assert process_setup.padded_length(5) == 32


def test_the_processor_is_read_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_setup, "_processor", READ)
    monkeypatch.delenv("MKL_CBWR", raising=False)
    process_setup.padded_length(3)
    monkeypatch.setattr(process_setup.Path, "read_text", lambda _: pytest.fail("read again"))
    assert process_setup.padded_length(3) >= 3
