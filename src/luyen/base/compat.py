"""The versions of torch and transformers that Luyen supports: version branches live here only."""

from importlib import metadata

SUPPORTED = {"torch": ((2, 11), (2, 14)), "transformers": ((5, 17), (5, 23))}
"""Package to the first supported version and the first one beyond."""


def version_of(package: str) -> tuple[int, int] | None:
    """Major and minor version of an installed package, without importing it; None if absent."""
    try:
        words = metadata.version(package).split(".")
    except metadata.PackageNotFoundError:
        return None
    return int(words[0]), int(words[1])


def is_supported(package: str, version: tuple[int, int]) -> bool:
    """Whether a version lies in the supported range.

    Example:
        >>> is_supported("torch", (2, 13)), is_supported("torch", (2, 10))
        (True, False)
    """
    first, beyond = SUPPORTED[package]
    return first <= version < beyond
