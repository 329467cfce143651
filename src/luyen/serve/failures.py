"""Replies that are errors: the HTTP status, and the body that OpenAI's clients read."""

from typing import Any, final

from luyen.base.errors import UserError, printable, shortened
from luyen.base.secrets import masked

INVALID = "invalid_request_error"
_MOST = 600
"""Characters of a message: what a client sent is quoted, but not sent back whole."""


@final
class ApiFailure(Exception):
    """A request that is answered with an error.

    Example:
        >>> ApiFailure(404, "no such model", param="model", code="model_not_found").body()["error"]
        {'message': 'no such model', 'type': 'invalid_request_error', 'param': 'model',
         'code': 'model_not_found'}
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        """`param` is the field of the request that is at fault."""
        super().__init__(status, message)
        self.status = status
        self.message = str(shortened(printable(masked(message)), most=_MOST))
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The body of the reply."""
        said = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": said}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the reply."""
        found: dict[str, str] = {}
        if self.retry_after_s is not None:
            found["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found


def refused(error: UserError) -> ApiFailure:
    """A value that cannot be served, as status 400 that names its field."""
    # The name of a field that does not exist comes from the client too.
    field = str(shortened(printable(error.field), most=120))
    said = f"{field} = {shortened(error.value)!r}: {error.why}. Fix: {error.fix}"
    return ApiFailure(400, said, param=field, code="invalid_value")


def wrong(field: str, value: Any, why: str, fix: str) -> UserError:
    """An error about one field, which quotes no more than the beginning of its value."""
    return UserError(field, shortened(value), why, fix)


def unknown_model(name: str, served: str) -> ApiFailure:
    """A request for a model that is not here."""
    message = f"model = {shortened(name)!r}: this server has {served!r}. Fix: ask for that one"
    return ApiFailure(404, message, param="model", code="model_not_found")


def engine_failure() -> ApiFailure:
    """The engine failed; what it said is in the server's log, and no business of the client."""
    message = "the engine failed at this request; its log says why"
    return ApiFailure(500, message, type="server_error", code="engine_failure")


def stopping() -> ApiFailure:
    """The server is about to end."""
    return ApiFailure(
        503, "the server is stopping", type="server_error", code="stopping", retry_after_s=5
    )


def queue_full(open_answers: int, most: int) -> ApiFailure:
    """More answers are open than the server takes."""
    return ApiFailure(
        429,
        f"{open_answers} answers are open, and the server takes {most}. Fix: retry",
        type="rate_limit_error",
        code="queue_full",
        retry_after_s=1,
    )


def too_slow(seconds: float) -> ApiFailure:
    """A request took longer than the server allows."""
    return ApiFailure(
        504,
        f"no answer within {seconds:g} seconds. Fix: lower max_tokens or n, or retry later",
        type="server_error",
        code="timeout",
    )
