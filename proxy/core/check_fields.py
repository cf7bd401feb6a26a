"""Fields that are refused before any work is done, each with a plain sentence."""

from collections.abc import Mapping

from proxy.core.request import bad_request


def check_n(rest: Mapping[str, object], most: int) -> None:
    """Raise Reject 400 for an `n` (answers wanted) that is no whole number from 1 to `most`."""
    n = rest.get("n")
    if n is None:
        return
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise bad_request("'n' must be a whole number of answers, at least 1.", "n", "invalid_value")
    if n > most:
        raise bad_request(f"'n' asks for {n} answers; at most {most} are given to one request.", "n", "invalid_value")


def check_other(fields: Mapping[str, object], most: int) -> None:
    """Check a body of /v1/responses or /v1/messages.

    Raises Reject 400 for more than `most` messages, and for a `previous_response_id`: whoever knows the id of a stored
    response could go on with another user's conversation.
    """
    if fields.get("previous_response_id") is not None:
        message = "'previous_response_id' is not supported here: send the whole conversation as input."
        raise bad_request(message, "previous_response_id", "invalid_value")
    for name in ("input", "messages"):
        listed = fields.get(name)
        if isinstance(listed, list) and len(listed) > most:
            raise bad_request(f"'{name}' holds {len(listed)} messages; at most {most} are taken.", name)
