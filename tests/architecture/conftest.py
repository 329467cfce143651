"""Syntax trees are kept to the end; looking for garbage among them takes half the time."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
