"""Paths as users write them."""

from pathlib import Path


def expanded(path: str) -> Path:
    """The path with `~` resolved; left as it is where there is no such user.

    Example:
        >>> expanded("~no-such-user/rows.jsonl").name
        'rows.jsonl'
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def is_directory(path: str) -> bool:
    """Whether a directory of this name is there; a name that cannot exist is not."""
    try:
        return expanded(path).is_dir()
    except (OSError, ValueError):
        return False


def exists(path: str) -> bool:
    """Whether anything of this name is there; a name that cannot exist is not."""
    try:
        return expanded(path).exists()
    except (OSError, ValueError):
        return False


def is_file(path: str) -> bool:
    """Whether a regular file of this name is there; a name that cannot exist is not."""
    try:
        return expanded(path).is_file()
    except (OSError, ValueError):
        return False
