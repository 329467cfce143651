"""The Hugging Face hub: whether it answers, and what its cache on this machine holds."""

import os
from functools import cache
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from luyen.base.paths import expanded

_HUB = "https://huggingface.co"
_PATIENCE_S = 5.0


def hub_is_reachable() -> bool:
    """Whether the hub answers within a few seconds and may be used."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true"):
        return False
    return _answers(os.environ.get("HF_ENDPOINT", _HUB))


@cache
def _answers(address: str) -> bool:
    """Asked once in a process: a run that waits again for each of its models would seem to hang."""
    try:
        with urlopen(Request(address, method="HEAD"), timeout=_PATIENCE_S):
            return True
    except HTTPError:
        return True  # a mirror need not have a page at its root
    except (URLError, OSError, ValueError):
        return False


def cached_revision(hub_id: str) -> str | None:
    """The commit that the hub's cache holds for a model; None where the cache does not have it."""
    try:
        return (_cached(hub_id) / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        return None


def cached_folder(hub_id: str) -> Path | None:
    """The folder of that commit; None where the cache does not have it."""
    revision = cached_revision(hub_id)
    if not revision or Path(revision).name != revision:
        return None
    found = _cached(hub_id) / "snapshots" / revision
    return found if found.is_dir() else None


def _cached(hub_id: str) -> Path:
    home = Path(os.environ.get("HF_HOME") or expanded("~/.cache/huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    return cache / f"models--{hub_id.replace('/', '--')}"
