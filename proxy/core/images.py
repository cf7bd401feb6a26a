"""Where images may come from: a caller's URL is a request made by the server that fetches it (CVE-2025-6242)."""

from collections.abc import Collection, Mapping, Sequence
from urllib.parse import urlsplit

from proxy.core.reject import Reject
from proxy.core.request import Message, parts_of

MEDIA = ("image_url", "input_image", "audio_url", "video_url")


def check_urls(messages: Sequence[Message], hosts: Collection[str]) -> None:
    """Raise Reject 400 for a media URL that is neither `data:` nor http(s) on one of `hosts`.

    Only the host is compared, so vLLM must run with redirects off (`VLLM_MEDIA_URL_ALLOW_REDIRECTS=0`) where hosts are
    allowed.
    """
    for i, message in enumerate(messages):
        for j, part in enumerate(parts_of(message)):
            kind = part.get("type")
            for name in MEDIA if kind is None or kind in MEDIA else ():
                url = _url(part.get(name))
                if url is not None and not _allowed(url, hosts):
                    where = f"messages[{i}].content[{j}].{name}"
                    raise Reject(
                        400, f"'{where}' must be a data: URL; this proxy lets vLLM fetch nothing else.", param=where
                    )


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
