"""The one exception meant for users, and nothing else a user should ever read."""

from typing import Any, final

from luyen.base.secrets import masked, masked_tree


@final
class UserError(Exception):
    """Something the user can mend: it names the field, the value, the reason and the fix.

    Example:
        >>> print(UserError("rollout.n", 1, "one sample has no siblings", "set rollout.n >= 2"))
        rollout.n = 1: one sample has no siblings. Fix: set rollout.n >= 2

    It holds no secret, so that it may be printed, logged and written anywhere.
    """

    def __init__(self, field: str, value: Any, why: str, fix: str) -> None:
        value, why, fix = masked_tree(value, field), masked(why), masked(fix)
        super().__init__(field, value, why, fix)
        self.field = field
        self.value = value
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r}: {self.why}. Fix: {self.fix}"
