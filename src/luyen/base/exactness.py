"""What bit-exact log-probabilities need from the process, before the first matrix product.

Rollout and training multiply the same rows in batches of different sizes. MKL chooses kernels by
size, and the sums then differ in the last bit, unless it is told to be strict.
"""

import functools
import os
import platform
from pathlib import Path

_VARIABLE = "MKL_CBWR"


def prepare_process() -> None:
    """Ask MKL for results that do not depend on batch size; a user's own setting is kept."""
    os.environ.setdefault(_VARIABLE, f"{instruction_set()},STRICT")


def instruction_set() -> str:
    """The widest MKL branch of this processor: AVX512 or AVX2."""
    return "AVX512" if "avx512f" in _processor() else "AVX2"


@functools.cache
def _processor() -> str:
    """What the system says of the first processor; empty where it says nothing."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.read_text().partition("\n\n")[0] if cpuinfo.is_file() else ""


def is_promised(dtype: str) -> bool:
    """Whether exactness is promised here: fp32 on an x86 processor with MKL in strict mode.

    MKL does not honour strict mode on the processors of other makers.
    """
    is_intel = platform.machine() in ("x86_64", "AMD64") and "AuthenticAMD" not in _processor()
    return is_intel and dtype == "float32" and "STRICT" in os.environ.get(_VARIABLE, "")


def padded_length(tokens: int) -> int:
    """Keys are padded to this many, so that attention sums in the same order for every query.

    Measured: on the AVX512 branch 32 suffices up to 256 tokens and 256 beyond; on AVX2, 512.

    Example:
        >>> padded_length(33) >= 33
        True
    """
    short = 32 if tokens <= 256 else 256
    step = short if instruction_set_in_force() == "AVX512" else 512
    return -(-tokens // step) * step


def instruction_set_in_force() -> str:
    """The MKL branch that was asked for, e.g. AVX512."""
    return (os.environ.get(_VARIABLE) or instruction_set()).partition(",")[0]
