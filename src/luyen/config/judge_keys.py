"""Keys of judges, which stand in the environment and nowhere else."""

import os

from luyen.base.errors import UserError


def judge_key(variable: str) -> str:
    """The key that an environment variable holds; a UserError where it holds none.

    Example:
        >>> try:
        ...     judge_key("NO_SUCH_KEY")
        ... except UserError as error:
        ...     error.fix
        'export NO_SUCH_KEY=...'
    """
    try:
        key = os.environ.get(variable, "").strip()
    except (ValueError, UnicodeError):  # no variable can have this name
        key = ""
    if not key or not key.isascii() or not key.isprintable():
        why = "the environment variable is not set, or holds no key"
        raise UserError("judge.api_key_env", variable, why, f"export {variable}=...")
    return key
