"""What this machine offers, learned without torch."""

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import final

from luyen.base.system import cores, memory_bytes

_GIB = 1024**3


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Cores, memory and GPUs of one machine.

    Example:
        >>> Machine(cpus=2, ram_bytes=24 * 1024**3).device_bytes("cpu")
        25769803776
    """

    cpus: int
    """Cores that this process may use."""
    ram_bytes: int
    """Main memory."""
    gpu_bytes: tuple[int, ...] = ()
    """Memory of each GPU; empty without one."""
    has_bf16: bool = True
    """Whether its cores multiply bf16 numbers; True where that is not known."""
    is_assumed: bool = False
    """Whether the GPUs are not this machine's, but what a plan is made for."""

    def device_bytes(self, device: str) -> int:
        """Memory of one device: the smallest GPU, or main memory on CPU."""
        return min(self.gpu_bytes) if device == "cuda" and self.gpu_bytes else self.ram_bytes

    def words(self) -> str:
        """One line for people."""
        count = len(self.gpu_bytes)
        gpus = f"{count} GPU{'s' if count > 1 else ''}" if count else "no GPU"
        if self.is_assumed:
            gpus = f"as if with GPUs of {min(self.gpu_bytes) / _GIB:g} GiB"
        return f"{self.cpus} cores, {self.ram_bytes / _GIB:.0f} GiB memory, {gpus}"


def this_machine() -> Machine:
    """The machine this process runs on."""
    gpus, has_bf16 = _gpu_memory(), _has_bf16(_CPUINFO)
    return Machine(cpus=cores(), ram_bytes=memory_bytes(), gpu_bytes=gpus, has_bf16=has_bf16)


_CPUINFO = Path("/proc/cpuinfo")
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}
"""What Linux calls instructions that multiply bf16 numbers, on x86 and on ARM."""


def _has_bf16(cpuinfo: Path) -> bool:
    """Whether the cores name such an instruction; True where they name none at all."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return True
    named = [line.partition(":") for line in lines]
    flags = [found for name, _, found in named if name.strip() in ("flags", "Features")]
    return not flags or bool(_BF16 & set(flags[0].split()))


class _NvmlMemory(ctypes.Structure):
    """NVML's answer to a question about memory."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def _gpu_memory() -> tuple[int, ...]:
    """Memory of each NVIDIA GPU by the driver's own library; empty where there is none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != 0:
        return ()
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    sizes: list[int] = []
    for index in range(count.value):
        handle, memory = ctypes.c_void_p(), _NvmlMemory()
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
            sizes.append(memory.total)
    nvml.nvmlShutdown()
    return visible_gpus(tuple(sizes), os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus(sizes: tuple[int, ...], chosen: str | None) -> tuple[int, ...]:
    """The GPUs that CUDA will show; NVML itself does not know of CUDA_VISIBLE_DEVICES.

    Example:
        >>> visible_gpus((80, 40), "1"), visible_gpus((80, 40), ""), visible_gpus((80, 40), None)
        ((40,), (), (80, 40))
    """
    if chosen is None:
        return sizes
    # Names other than numbers (GPU-..., MIG-...) count, but their sizes are not known here.
    words = [word.strip() for word in chosen.split(",") if word.strip()]
    numbers = [int(word) if word.lstrip("-").isdigit() else 0 for word in words]
    shown = [n for n in numbers if n < len(sizes)]
    if -1 in shown:
        shown = shown[: shown.index(-1)]
    return tuple(sizes[n] for n in shown)
