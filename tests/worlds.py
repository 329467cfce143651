"""Processes for the ranks of a world: a server imports what all of them need, and forks them."""

import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any


def forks() -> ForkServerContext:
    """Begins processes that have imported the libraries already."""
    context = multiprocessing.get_context("forkserver")
    # With CUDA they import them themselves: bitsandbytes initialises CUDA when it is imported, and
    # a process that was forked after that cannot use it.
    is_on_gpu = os.environ.get("LUYEN_TEST_DEVICE") == "cuda"
    context.set_forkserver_preload([] if is_on_gpu else ["luyen.runtime.worker"])
    return context


def run_together(
    job: Callable[..., None], arguments: Sequence[tuple[Any, ...]], folder: Path, *, limit_s: float
) -> None:
    """Call a function in a process for each; unless all return, an AssertionError says why."""
    files = [folder / f"process_{index}.txt" for index in range(len(arguments))]
    processes = [
        forks().Process(target=_call, args=(job, own, file), daemon=True)
        for own, file in zip(arguments, files, strict=True)
    ]
    for process in processes:
        process.start()
    last = time.monotonic() + limit_s
    try:
        for process in processes:
            process.join(max(0.0, last - time.monotonic()))
    finally:
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
    said = "\n".join(file.read_text() for file in files if file.exists())
    assert codes == [0] * len(processes), f"{codes}\n{said}"


def _call(job: Callable[..., None], arguments: tuple[Any, ...], file: Path) -> None:
    """Warnings are errors; what is said goes to a file."""
    said = file.open("w", buffering=1)
    os.dup2(said.fileno(), sys.stdout.fileno())
    os.dup2(said.fileno(), sys.stderr.fileno())
    warnings.simplefilter("error")
    try:
        job(*arguments)
    except BaseException:
        traceback.print_exc(file=said)
        raise
