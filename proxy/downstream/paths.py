"""Paths are compared exactly as they came; a near miss is answered with the right one, never by a redirect."""

from collections.abc import Collection
from urllib.parse import unquote

# Longer ones are nobody's typing mistake.
_LONGEST = 512


def raw_path(target: str) -> str:
    """Return the path of a request target as it came: undecoded, without query and without an absolute one's origin."""
    path = target.partition("?")[0].partition("#")[0]
    scheme, mark, rest = path.partition("://")
    if mark and "/" not in scheme:
        path = "/" + rest.partition("/")[2]
    return path


def suggestion(path: str, known: Collection[str]) -> str | None:
    """Return the known path that `path` was probably meant to be, None if there is none or it tries to climb.

    Known slips: a base URL with a slash too many, without `/v1` or with `/v1` twice, capitals, encoded letters.
    """
    if len(path) > _LONGEST:
        return None
    segments = [segment.partition(";")[0] for segment in unquote(unquote(path)).lower().split("/")]
    segments = [segment for segment in segments if segment and segment != "."]
    if ".." in segments:
        return None
    while segments[:1] == ["v1"]:
        segments = segments[1:]
    bare = "/" + "/".join(segments)
    return next((candidate for candidate in ("/v1" + bare, bare) if candidate in known and candidate != "/"), None)


def not_found_message(path: str, known: Collection[str]) -> str:
    """Return one sentence for the user; it quotes only paths of ours."""
    meant = suggestion(path, known)
    if meant is None:
        return "There is nothing at this path. The base URL of this server ends in /v1."
    advice = "The base URL of this server ends in /v1, without a slash after it."
    return f"There is nothing at this path. Did you mean {meant}? {advice}"
