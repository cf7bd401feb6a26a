"""Answers that the proxy gives itself, on purpose, in OpenAI's error shape."""

from collections.abc import Mapping
from dataclasses import dataclass, field


def error_body(
    message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | int | None = None
) -> dict[str, object]:
    """Build OpenAI's error envelope; `message` is one plain sentence, all that Open WebUI shows of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(eq=False)
class Reject(Exception):
    """An answer to the client instead of a call to vLLM; raised anywhere, turned into a reply in one place."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, object]:
        """Return the JSON body of the answer."""
        return error_body(self.message, kind=self.kind, param=self.param, code=self.code)
