"""What a command does before torch and transformers load."""

import os

from luyen.base.exactness import prepare_process


def prepare() -> None:
    """Settings for exact numbers, and no progress bars of libraries between the lines."""
    prepare_process()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
