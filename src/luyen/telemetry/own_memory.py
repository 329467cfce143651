"""The most memory that this process has held."""

import re
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_PEAK = re.compile(r"VmHWM:\s+(\d+) kB")


def peak_bytes() -> int:
    """Most bytes of main memory so far, those that are shared with other processes included.

    Example:
        >>> peak_bytes() > 1_000_000
        True
    """
    # The kernel hands ru_maxrss on from the parent; VmHWM is this process's own.
    found = _PEAK.search(_STATUS.read_text()) if _STATUS.is_file() else None
    if found is not None:
        return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
