"""Why a judge gave no score, by name. A fault is counted under its name and never scored."""

from typing import final

TIMEOUT = "timeout"
CONNECTION = "connection"
ENGINE = "engine"
TOO_LONG = "too_long"
NOT_JSON = "not_json"
SHAPE = "shape"
EMPTY = "empty"
CUT_OFF = "cut_off"
UNPARSABLE = "unparsable"
NOT_FINITE = "not_finite"
OUT_OF_RANGE = "out_of_range"

_SHOWN = 120
_OF_THE_REPLY = (CUT_OFF, UNPARSABLE, NOT_FINITE, OUT_OF_RANGE)
_PASSING_STATUS = ("http_408", "http_409", "http_425", "http_429")

_OUTSIDE = (TIMEOUT, CONNECTION, ENGINE)


@final
class JudgeFault(Exception):
    """No score from a judge.

    Example:
        >>> fault = JudgeFault("http_429", "slow down", retry_after_s=2.0)
        >>> str(fault), fault.may_pass(temperature=0.0)
        ('judge http_429: slow down', True)
        >>> JudgeFault("unparsable", "no number").may_pass(temperature=0.0)
        False
    """

    def __init__(self, kind: str, detail: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(f"judge {kind}: {detail}")
        self.kind = kind
        self.retry_after_s = retry_after_s
        self.reply: str | None = None
        """The reply that has no score, where there was one."""

    def may_pass(self, *, temperature: float) -> bool:
        """Whether the same request may succeed later.

        A refusal stays one. A reply without a score comes again word for word at temperature 0.
        """
        if self.kind.startswith("http_"):
            return self.kind in _PASSING_STATUS or self.kind.startswith("http_5")
        return temperature > 0 if self.kind in _OF_THE_REPLY else True


def quoted_end(text: str) -> str:
    """The end of a text, as a fault quotes it.

    Example:
        >>> quoted_end("seven"), len(quoted_end("7" * 1000))
        ("'seven'", 125)
    """
    return repr(text if len(text) <= _SHOWN else f"...{text[-_SHOWN:]}")


def is_outside(error: str) -> bool:
    """Whether a fault says that a judge could not be reached or did not answer in time.

    Example:
        >>> is_outside(str(JudgeFault("http_503", "busy"))), is_outside("ValueError: x")
        (True, False)
    """
    head, _, rest = error.partition("judge ")
    kind = rest.partition(":")[0]
    is_ours = not head.strip() or head.rstrip().endswith(":")
    return is_ours and (kind in _OUTSIDE or kind.startswith("http_"))
