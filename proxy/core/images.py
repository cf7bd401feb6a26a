"""Where images may come from: a caller's URL is a request made by the server that fetches it (CVE-2025-6242)."""

from collections.abc import Collection, Mapping, Sequence
from urllib.parse import urlsplit

from proxy.core.reject import Reject
from proxy.core.request import Message, parts_of

MEDIA = ("image_url", "input_image", "audio_url", "video_url")
_SOURCES = ("image_url", "audio_url", "video_url", "file_url", "source")
_NOT_CONTENT = frozenset({"tools", "metadata", "text", "tool_choice"})
_Path = tuple["_Path | None", str | int]


def check_urls(messages: Sequence[Message], hosts: Collection[str]) -> None:
    """Raise Reject 400 for a media URL that is neither `data:` nor http(s) on one of `hosts`.

    Only the host is compared, so vLLM must run with redirects off (`VLLM_MEDIA_URL_ALLOW_REDIRECTS=0`) where hosts are
    allowed.
    """
    for i, message in enumerate(messages):
        if isinstance(message.get("content"), str):
            continue
        for j, part in enumerate(parts_of(message)):
            # Whatever the part says that it is: with a `uuid`, or a type that it does not know, vLLM goes by the field.
            for name in MEDIA:
                url = _url(part.get(name))
                if url is not None and not _allowed(url, hosts):
                    raise _refused(f"messages[{i}].content[{j}].{name}")


def check_media(fields: Mapping[str, object], hosts: Collection[str], most: int) -> None:
    """Do the same for a body of any other route, wherever in it a media source stands, without recursion.

    Raises Reject 400 also for more than `most` sources.  What describes tools, or was given to one, is no source.
    """
    places: list[tuple[object, _Path]] = [
        (value, (None, name)) for name, value in fields.items() if name not in _NOT_CONTENT
    ]
    count = 0
    while places:
        value, path = places.pop()
        if isinstance(value, list):
            places += ((one, (path, i)) for i, one in enumerate(value) if isinstance(one, dict | list))
        elif isinstance(value, dict):
            sources = [(name, one) for name, one in value.items() if name in _SOURCES and _is_source(name, one)]
            count += bool(sources)
            for name, one in sources:
                url = _url(one)
                if url is not None and not _allowed(url, hosts):
                    raise _refused(_spelled((path, name)))
            skip = "input" if value.get("type") in ("tool_use", "server_tool_use") else None
            places += (
                (one, (path, name)) for name, one in value.items() if name != skip and isinstance(one, dict | list)
            )
    if count > most:
        raise Reject(400, f"The request holds {count} images or files; at most {most} are taken.", param="input")


def _is_source(name: str, value: object) -> bool:
    if name == "source":  # Anthropic's: {"type": "url", "url": ...} or {"type": "base64", "data": ...}
        return isinstance(value, Mapping) and value.get("type") in ("url", "base64", "file")
    return _url(value) is not None


def _spelled(path: "_Path") -> str:
    out = ""
    at: _Path | None = path
    while at is not None:
        out = (f"[{at[1]}]" if isinstance(at[1], int) else f".{at[1]}") + out
        at = at[0]
    return out.lstrip(".")


def _refused(where: str) -> Reject:
    message = f"'{where}' must be a data: URL; this proxy lets vLLM fetch nothing else."
    return Reject(400, message, param=where)


def _url(value: object) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("url")
    return value if isinstance(value, str) else None


def _allowed(url: str, hosts: Collection[str]) -> bool:
    if url[:5].lower() == "data:":
        return True
    # Who is the host of "https://a\@b/"?  Parsers disagree, and vLLM has another one than we have.
    if "\\" in url or " " in url or not url.isprintable():
        return False
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and "@" not in parts.netloc and parts.hostname in hosts
    except ValueError:
        return False
