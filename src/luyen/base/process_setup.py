"""Process setup before torch loads: exact arithmetic, supported versions, garbage collection.

Rollout and training multiply the same rows in batches of different sizes. On Intel, MKL chooses
kernels by size, and the sums then differ in the last bit, unless it is set to be strict. MKL on AMD
and OpenBLAS on ARM sum every row alike, few ones apart (`luyen.models.batch_invariant_linear`).
"""

import functools
import gc
import logging
import os
import platform
import re
from collections.abc import Generator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

_VARIABLE = "MKL_CBWR"
_ZEN_5 = 26
"""What the system calls the family of AMD's processors of 2024."""
_UNUSED_KERNEL = "bitsandbytes.backends.cpu.ops"
"""Logger that asks, on some CPUs, for another package with a product that Luyen does not use."""


def prepare_process() -> None:
    """Ask MKL for results that do not depend on batch size; a user's own setting is kept."""
    if has_mkl():
        os.environ.setdefault(_VARIABLE, f"{instruction_set()},STRICT")
    logging.getLogger(_UNUSED_KERNEL).setLevel(logging.ERROR)


def has_mkl() -> bool:
    """Whether PyTorch multiplies with MKL on this kind of processor."""
    return platform.machine() in ("x86_64", "AMD64")


def instruction_set() -> str:
    """The widest MKL branch of this processor, AVX512 or AVX2; NEON where there is no MKL."""
    if not has_mkl():
        return "NEON"
    return "AVX512" if "avx512f" in _processor() else "AVX2"


@functools.cache
def _processor() -> str:
    """What the system says of the first processor; empty where it says nothing."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.read_text().partition("\n\n")[0] if cpuinfo.is_file() else ""


def is_amd() -> bool:
    """Whether this is an x86-64 processor of AMD, on which MKL knows no strict mode."""
    return has_mkl() and "AuthenticAMD" in _processor()


def is_promised(dtype: str) -> bool:
    """Whether exactness is promised here: in fp32, on the processors where it was measured.

    On Intel with MKL in strict mode; on AMD from Zen 5 on, whose family is 26; with OpenBLAS on ARM
    without SVE, for which it has other kernels. Other systems on ARM have another library.
    """
    if dtype != "float32":
        return False
    if is_amd():
        family = re.search(r"^cpu family\s*: (\d+)$", _processor(), re.MULTILINE)
        is_measured = family is not None and int(family[1]) >= _ZEN_5
        return is_measured and instruction_set_in_force() == "AVX512"
    if has_mkl():
        return "STRICT" in os.environ.get(_VARIABLE, "")
    is_linux_on_arm = (platform.system(), platform.machine()) == ("Linux", "aarch64")
    return is_linux_on_arm and " sve" not in _processor()


def least_rows() -> int:
    """Rows that a product needs here to give each row the bits that it has among many; 1: any."""
    if is_amd():
        return 4
    return 1 if has_mkl() else 2


def padded_length(tokens: int) -> int:
    """Keys are padded to this many, so that attention sums in the same order for every query.

    Measured: 32 suffices up to 256 tokens and 256 beyond; on AMD 32 up to 128 and 512 beyond; on
    MKL's AVX2 branch it takes 512.

    Example:
        >>> padded_length(33) >= 33
        True
    """
    if instruction_set_in_force() == "AVX2":
        step = 512
    elif is_amd():
        step = 32 if tokens <= 128 else 512
    else:
        step = 32 if tokens <= 256 else 256
    return -(-tokens // step) * step


def instruction_set_in_force() -> str:
    """The requested MKL branch, e.g. AVX512; NEON where there is no MKL."""
    requested = os.environ.get(_VARIABLE) if has_mkl() else None
    return (requested or instruction_set()).partition(",")[0]


# The versions of torch and transformers that Luyen supports: version branches live here only.

SUPPORTED = {"torch": ((2, 11), (2, 14)), "transformers": ((5, 17), (5, 23))}
"""Package to the first supported version and the first one beyond."""


@functools.cache
def installed_version(package: str) -> str | None:
    """Version of an installed package, without importing it; None if absent.

    Read once in a process, which keeps what it has imported: each reading takes 5 ms.
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def version_of(package: str) -> tuple[int, int] | None:
    """Major and minor version of an installed package, without importing it; None if absent."""
    version = installed_version(package)
    if version is None:
        return None
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def is_supported(package: str, version: tuple[int, int]) -> bool:
    """Whether a version lies in the supported range.

    Example:
        >>> is_supported("torch", (2, 13)), is_supported("torch", (2, 10))
        (True, False)
    """
    first, beyond = SUPPORTED[package]
    return first <= version < beyond


# Garbage collection: objects that exist at the start of a run are frozen, and not scanned again.

_YOUNG = 20_000
"""New objects before the collector looks at them: records of a step are many, and no garbage."""


@contextmanager
def frozen_gc() -> Generator[None]:
    """Inside, Python's collector passes over everything that was there before.

    Half a million objects of imported packages take it a quarter of a second, and it looks through
    all of them every few steps.
    """
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()
