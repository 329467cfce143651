"""Every test runs on one core, so that suites can share a machine, and with exact arithmetic."""

import atexit
import gc
import os
import shutil
import tempfile
from pathlib import Path

import torch
from hypothesis import settings

from luyen.base.process_setup import prepare_process

# Runs of these tests are signed with a key of their own, not with that of whoever runs them.
_keys = tempfile.mkdtemp(prefix="luyen-key-")
atexit.register(shutil.rmtree, _keys, ignore_errors=True)
os.environ["LUYEN_KEY_FILE"] = str(Path(_keys) / "key")

# What is imported while tests are collected stays to the end: there is no garbage to look for.
gc.disable()
prepare_process()
torch.set_num_threads(1)

# How long an example takes says nothing on a machine that others use too.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


def pytest_collection_finish() -> None:
    """From here on garbage is looked for, but not in what was imported, and not all the time."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()
