"""Process setup before torch loads: exact arithmetic, supported versions, garbage collection.

Rollout and training multiply the same rows in batches of different sizes. MKL, on x86, chooses
kernels by size, and the sums then differ in the last bit, unless it is set to be strict. OpenBLAS,
on ARM under Linux, sums every row alike, single ones apart (`luyen.models.batch_invariant_linear`).
"""

import functools
import gc
import logging
import os
import platform
from collections.abc import Generator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

_VARIABLE = "MKL_CBWR"
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


def is_promised(dtype: str) -> bool:
    """Whether exactness is promised here: fp32, with MKL in strict mode or with OpenBLAS on ARM.

    MKL does not honour strict mode on the processors of other makers than Intel. OpenBLAS was
    measured without SVE, for which it has other kernels; other systems have another library.
    """
    if dtype != "float32":
        return False
    if has_mkl():
        return "AuthenticAMD" not in _processor() and "STRICT" in os.environ.get(_VARIABLE, "")
    is_linux_on_arm = (platform.system(), platform.machine()) == ("Linux", "aarch64")
    return is_linux_on_arm and " sve" not in _processor()


def padded_length(tokens: int) -> int:
    """Keys are padded to this many, so that attention sums in the same order for every query.

    Measured: 32 suffices up to 256 tokens and 256 beyond; on MKL's AVX2 branch it takes 512.

    Example:
        >>> padded_length(33) >= 33
        True
    """
    short = 32 if tokens <= 256 else 256
    step = 512 if instruction_set_in_force() == "AVX2" else short
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
