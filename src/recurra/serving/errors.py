"""Errors in OpenAI's form: one object with a message, a type, a parameter and a code. Never a traceback."""

from fastapi.responses import JSONResponse


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: what came, what was expected, and how to mend it.
        code: a word for programs.
        param: the field that it is about.
        retry_after: seconds until it makes sense to try again.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after

    def response(self) -> JSONResponse:
        """The answer."""
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after else None
        return JSONResponse(error_body(self), self.status, headers)


_TYPES = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 429: "rate_limit_error"}


def error_body(error: ApiError) -> dict[str, dict[str, str | None]]:
    """The body of an error."""
    kind = "server_error" if error.status >= 500 else _TYPES.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def unknown_session(name: str) -> ApiError:
    """There is no such session, or it is another key's: both look the same."""
    return ApiError(404, f"session is {name!r}, which does not exist; expected an open one", code="session_not_found")
